"""`zerolora doctor`: what a run needs of this host and of others."""
