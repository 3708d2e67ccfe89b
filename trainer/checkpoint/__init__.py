"""What a run writes to go on from and to keep: checkpoints, weights, its record."""
