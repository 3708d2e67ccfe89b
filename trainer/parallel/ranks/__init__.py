"""A rank among others: process group, agreement, signals, progress, watchdog."""
