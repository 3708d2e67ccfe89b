"""Run on several ranks: the process group and its watchdog, DeepSpeed's engine, per-layer all-gather."""
