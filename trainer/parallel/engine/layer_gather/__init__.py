"""Shard the frozen base model over the ranks (ZeRO-3), and gather it one decoder layer ahead."""
