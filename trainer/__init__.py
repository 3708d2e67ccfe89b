"""What every rank of a run of zerolora executes: configuration, data, model, engine, loop, checkpoints, reports."""
