"""`zerolora import`: convert another trainer's configuration or command line to a zerolora configuration."""
