"""Whether the ranks are alive: phases, heartbeats, and a watchdog that names a hang."""
