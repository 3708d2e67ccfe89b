"""What runs on the user's terminal or a login node: no torch here, so that every command answers at once."""
