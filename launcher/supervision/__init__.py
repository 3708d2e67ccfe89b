"""A run under way: its processes, their ends, and what is reported of them."""
