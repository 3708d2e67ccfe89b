"""What launcher and ranks share: files, exit codes, ports and rank variables. Imports no torch."""
