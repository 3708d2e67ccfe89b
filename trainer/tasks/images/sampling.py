"""Sample images, drawn by diffusers' pipeline with the denoiser that is being trained."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainer.config import ImageSection
from trainer.contract.known_versions import require
from trainer.parallel.engine.protocol import Engine
from trainer.tasks.images.families import Conditions
from trainer.tasks.images.pipeline import Pipeline


@torch.no_grad()
def draw_samples(
    engine: Engine,
    pipeline: Pipeline,
    image: ImageSection,
    prompts: Sequence[str],
    captions: Mapping[str, Conditions],
    *,
    device: torch.device,
    seed: int,
) -> list[Any]:
    """Draw an image (PIL) for each prompt, always with the same seeds; every rank must call it.

    `captions` holds the cached conditions of each prompt, and of the empty prompt for classifier-free guidance.
    """
    model = engine.module.get_base_model()
    was_training = engine.module.training
    engine.eval()
    drawn = build_sampling_pipeline(model.denoiser, pipeline, device)
    images = []
    for index, prompt in enumerate(prompts):
        given, empty = (model.conditions([each], _rows(captions[each], device, model.dtype)) for each in (prompt, ""))
        arguments: dict[str, Any] = dict(pipeline.family.pipeline_arguments(given, negative=empty))
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
        images.append(_decode(drawn, found, image.resolution))
    drawn.vae.to("cpu")
    engine.train(was_training)
    return images


def build_sampling_pipeline(denoiser: Any, pipeline: Pipeline, device: torch.device) -> Any:
    """Build the pipeline with this denoiser, a VAE in 32 bits and no text encoders."""
    drawn = pipeline.encoder(torch.float32, text=False, vae=True)  # the pipeline derives the latent size from its VAE
    drawn.register_modules(**{pipeline.family.denoiser: denoiser})
    drawn.vae.to(device)
    drawn.set_progress_bar_config(disable=True)
    return drawn


def _rows(conditions: Conditions, device: torch.device, dtype: torch.dtype) -> Conditions:
    return {name: value[None].to(device, dtype) for name, value in conditions.items()}


def _decode(drawn: Any, latents: torch.Tensor, side: int) -> Any:
    """Decode latents to an image, as the pipeline itself does."""
    vae = drawn.vae
    if latents.dim() == 3:  # packed [B, T, 4 C], by pipelines that cut latents into patches themselves
        latents = require(drawn, "_unpack_latents", "diffusers")(latents, side, side, drawn.vae_scale_factor)
    latents = latents.float()
    if not hasattr(vae, "bn"):  # FLUX.2's pipeline has done this
        latents = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
    return drawn.image_processor.postprocess(vae.decode(latents, return_dict=False)[0], output_type="pil")[0]
