"""The trainer: configuration, data, model, engine, training loop, checkpoints, reports and commands."""
