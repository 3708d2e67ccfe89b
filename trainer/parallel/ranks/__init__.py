"""What concerns a rank among others: process group, agreement, signals, progress, watchdog."""
