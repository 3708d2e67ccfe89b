"""Convert files and Hub datasets to masked, packed and deterministic micro-batches."""
