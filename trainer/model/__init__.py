"""Load the base model (stored or random weights in 16, 8 or 4 bits) and add its adapter."""
