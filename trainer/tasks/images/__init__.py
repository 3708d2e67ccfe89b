"""Image models: pipelines of diffusers, whose denoiser gets an adapter."""
