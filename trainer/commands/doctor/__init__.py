"""What `zerolora doctor` asks of torch: on one machine, and of all ranks together."""
