"""`zerolora report`: a run as one page."""
