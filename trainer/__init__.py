"""The trainer of zerolora: configuration, data, model, engine, training loop, checkpoints, reports and commands."""

# launcher/cli.py looks for "zerolora" in this file.
