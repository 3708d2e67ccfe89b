"""Checkpoints, weights and the record of a run."""
