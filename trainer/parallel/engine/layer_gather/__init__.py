"""ZeRO-3 per layer: the frozen base in one shard per layer and rank, gathered one layer ahead."""
