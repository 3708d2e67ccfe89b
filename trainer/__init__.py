"""The code of every rank of a zerolora run: configuration, data, model, engine, loop, checkpoints, reports."""
