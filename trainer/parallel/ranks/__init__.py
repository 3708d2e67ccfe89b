"""Coordinate the ranks: process group, agreement, signals, progress, watchdog."""
