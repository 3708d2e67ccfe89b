"""What is seen of a run: metrics, console, profiles, the report."""
