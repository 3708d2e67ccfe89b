"""Checks run by `zerolora doctor` that need torch, on one machine and across all ranks."""
