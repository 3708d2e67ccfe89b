"""`zerolora import`: another trainer's configuration, or its command line, as a configuration of ours."""
