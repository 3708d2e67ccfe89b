"""DeepSpeed's engine: its configuration, the optimizer and its state, flat adapters, per-layer stage 3."""
