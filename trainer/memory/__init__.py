"""The GPU memory of a run: its estimate, the check before training, and recovery from out-of-memory errors."""
