"""Define what differs between kinds of models: language and images."""
