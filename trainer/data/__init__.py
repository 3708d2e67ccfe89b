"""Convert files and Hub datasets into masked, packed and deterministic micro-batches."""
