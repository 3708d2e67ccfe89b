"""The base model (configuration and weights, stored or random, in 16, 8 or 4 bits) and its adapter."""
