"""Read and write checkpoints, final weights and run records."""
