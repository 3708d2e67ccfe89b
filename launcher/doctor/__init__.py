"""`zerolora doctor`: check this host and others for everything a run needs."""
