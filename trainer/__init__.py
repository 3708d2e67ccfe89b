"""The code of every rank of a run: configuration, data, model, engine, loop, checkpoints, reports."""
