"""Code shared by launcher and ranks: files, exit codes, ports and rank variables. Does not import torch."""
