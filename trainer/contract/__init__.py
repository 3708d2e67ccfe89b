"""Code shared by the launcher and the ranks: files, exit codes, ports and rank variables. Does not import torch."""
