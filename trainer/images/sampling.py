"""Sample images: diffusers' pipeline around the denoiser that is being trained."""

from collections.abc import Sequence
from typing import Any

import torch

from trainer.config import ImageSection
from trainer.contract.known_versions import require
from trainer.engine.protocol import Engine
from trainer.images.families import Conditions
from trainer.images.pipeline import Pipeline


@torch.no_grad()
def draw_samples(
    engine: Engine,
    pipeline: Pipeline,
    image: ImageSection,
    conditions: Sequence[Conditions],
    empty: Conditions,
    *,
    device: torch.device,
    seed: int,
) -> list[Any]:
    """A picture (PIL) for each caption that was encoded, the same seeds every time; every rank must call it.

    `empty` is the encoded empty caption, away from which the guidance leads.
    """
    model = engine.module.get_base_model()
    was_training = engine.module.training
    engine.eval()
    drawn = pipeline_around(model.denoiser, pipeline, device)
    pictures = []
    for index, each in enumerate(conditions):
        given = _rows(each, device, model.dtype)
        arguments: dict[str, Any] = dict(
            pipeline.family.as_arguments(given, negative=_rows(empty, device, model.dtype))
        )
        if image.sample_guidance != "auto":
            arguments["guidance_scale"] = image.sample_guidance
        found = drawn(
            **arguments,
            height=image.resolution,
            width=image.resolution,
            num_inference_steps=image.sample_steps,
            generator=torch.Generator().manual_seed(seed + index),
            output_type="latent",
        ).images
        pictures.append(_decoded(drawn, found, image.resolution))
    drawn.vae.to("cpu")
    engine.train(was_training)
    return pictures


def pipeline_around(denoiser: Any, pipeline: Pipeline, device: torch.device) -> Any:
    """The pipeline with this denoiser, its VAE in 32 bits and no text encoders."""
    drawn = pipeline.encoder(torch.float32, text=False, vae=True)  # by its VAE it knows the size of latents
    drawn.register_modules(**{pipeline.family.denoiser: denoiser})
    drawn.vae.to(device)
    drawn.set_progress_bar_config(disable=True)
    return drawn


def _rows(conditions: Conditions, device: torch.device, dtype: torch.dtype) -> Conditions:
    return {name: value[None].to(device, dtype) for name, value in conditions.items()}


def _decoded(drawn: Any, latents: torch.Tensor, side: int) -> Any:
    """A picture of latents as the pipeline leaves them."""
    vae = drawn.vae
    if latents.dim() == 3:  # packed: [B, T, 4 C], of pipelines that cut latents into patches themselves
        latents = require(drawn, "_unpack_latents", "diffusers")(latents, side, side, drawn.vae_scale_factor)
    latents = latents.float() / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
    return drawn.image_processor.postprocess(vae.decode(latents, return_dict=False)[0], output_type="pil")[0]
