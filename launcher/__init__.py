"""The command line and launcher of zerolora. Imports no torch, so that commands respond at once."""

# launcher/cli.py looks for "zerolora" in this file.
