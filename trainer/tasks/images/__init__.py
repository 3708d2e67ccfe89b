"""Image models: diffusers pipelines with an adapter in the denoiser."""
