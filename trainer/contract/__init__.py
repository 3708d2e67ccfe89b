"""What the launcher and the ranks share, free of torch: files, exit codes, ports, rank variables."""
