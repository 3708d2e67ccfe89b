"""Run a rank from start to exit: settings, data, lock, watchdog and exit code; train several adapters in one run."""
