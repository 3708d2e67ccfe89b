"""The zerolora trainer: configuration, data, model, engine, checkpoints, reports and commands."""

# launcher/cli.py looks for "zerolora" in this file.
