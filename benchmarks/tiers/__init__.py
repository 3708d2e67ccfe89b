"""`zerolora tier`: five runs of increasing size with asserted thresholds."""
