"""`zerolora report`: render a run as one HTML page."""
