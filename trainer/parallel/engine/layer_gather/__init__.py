"""Per-layer ZeRO-3: the frozen base in one shard per layer and rank, gathered one layer ahead."""
