"""`zerolora bench`: compare the product with its peers on one card, and show the time by category."""
