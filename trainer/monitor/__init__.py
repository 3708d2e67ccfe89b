"""Monitor a run: metrics, console, profiles and the report."""
