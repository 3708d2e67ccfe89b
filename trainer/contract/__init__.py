"""Shared by launcher and ranks, without torch: files, exit codes, ports, rank variables."""
