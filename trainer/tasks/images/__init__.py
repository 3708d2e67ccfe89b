"""Image models: pipelines of diffusers with an adapter in the denoiser."""
