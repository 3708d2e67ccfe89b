"""Run a rank from start to exit, and train several adapters in one run."""
