"""`zerolora import`: convert another trainer's configuration or command line into one of zerolora's."""
