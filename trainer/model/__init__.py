"""Load the base model (stored or random weights; 16-bit, 8-bit or 4-bit) and add its adapter."""
