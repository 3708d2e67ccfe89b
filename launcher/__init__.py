"""What of zerolora runs on a terminal or a login node: no torch here, so that every command answers at once."""
