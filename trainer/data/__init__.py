"""Data: from files and hub names to masked, packed, deterministic micro-batches. Much of it imports no torch."""
