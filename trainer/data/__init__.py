"""Convert files and hub datasets to masked, packed and deterministic micro-batches."""
