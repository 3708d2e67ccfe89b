"""`zerolora compare`: trials of controllers and seeds, their tables and plots."""
