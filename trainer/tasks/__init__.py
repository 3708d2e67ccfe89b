"""The model-specific parts of training, for language and image models."""
