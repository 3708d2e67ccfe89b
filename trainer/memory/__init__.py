"""GPU memory: estimates, the check before training, and recovery from out-of-memory errors."""
