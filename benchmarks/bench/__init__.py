"""`zerolora bench`: the product and its peers side by side on one card, and the time by category."""
