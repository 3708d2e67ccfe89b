"""Command line and launcher of zerolora. Does not import torch, so that commands start quickly."""

# launcher/cli.py looks for "zerolora" in this file.
