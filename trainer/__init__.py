"""What every rank of a run executes: configuration, data, model, engine, loop, checkpoints, reports."""
