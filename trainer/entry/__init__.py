"""Start and end a rank: settings, data, lock, watchdog, exit code; the run of several adapters."""
