"""`zerolora tier`: five runs of rising size whose thresholds are asserted."""
