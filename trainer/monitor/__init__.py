"""Monitoring of a run: metrics, console, profiles and the report."""
