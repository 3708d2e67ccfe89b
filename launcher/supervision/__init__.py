"""Start the processes of a run, watch them, and report how they exited."""
