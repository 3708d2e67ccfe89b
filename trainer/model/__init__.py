"""The base model: its configuration and weights, random or stored, 16, 8 or 4 bits, and its adapter."""
