"""DeepSpeed's engine: its configuration, the optimizer and its state, flat adapters, stage 3 per layer."""
