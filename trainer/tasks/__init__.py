"""The model-specific parts of training: language and image models."""
