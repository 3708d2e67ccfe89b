"""Start and end a rank: settings, data, lock, watchdog and exit code; train several adapters in one run."""
