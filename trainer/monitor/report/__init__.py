"""`zerolora report`: a finished run as summary, plots and one page."""
