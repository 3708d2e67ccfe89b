"""ZeRO-3 by layers: the frozen base in one shard per layer and rank, gathered one layer ahead."""
