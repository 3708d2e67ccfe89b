"""The supported pipelines: how their captions are encoded and their denoisers are called.

Shapes: B images, C channels, H and W latent height and width, T caption tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Conditions = dict[str, Tensor]
FLUX_TIMESTEP_SCALE = 1000.0  # scheduler timesteps per unit of the model's time


@dataclass(frozen=True)
class Family:
    name: str
    pipeline: str
    """Class of the pipeline in diffusers."""
    denoiser: str
    """Name of the trained component."""
    model: str
    """Class of the denoiser."""
    scheduler: str
    """Class of the scheduler that adds noise in training."""
    patch: int
    """Required divisor of the latent height and width."""
    text_encoders: tuple[str, ...]
    uses_negative_prompt: bool
    """Whether sampling uses a negative prompt (classifier-free guidance)."""
    encode: Callable[[Any, Sequence[str], torch.device], Conditions]
    """(pipeline, captions, device) -> conditions, each [B, ...]."""
    predict: Callable[[nn.Module, Tensor, Tensor, Conditions], Tensor]
    """(denoiser, noisy latents [B, C, H, W], scheduler timesteps [B], conditions) -> prediction [B, C, H, W]."""
    packing: int = 1
    """Side of the squares of VAE latents that are packed into the channels of one latent."""

    @property
    def is_flow_matching(self) -> bool:
        return self.scheduler == "FlowMatchEulerDiscreteScheduler"

    def build_pipeline_arguments(self, conditions: Conditions, negative: Conditions) -> Conditions:
        arguments = {PIPELINE_ARGUMENTS[name]: value for name, value in conditions.items()}
        if self.uses_negative_prompt:
            arguments |= {f"negative_{PIPELINE_ARGUMENTS[name]}": value for name, value in negative.items()}
        return arguments


PIPELINE_ARGUMENTS = {"text": "prompt_embeds", "pooled": "pooled_prompt_embeds"}


def _encode_captions(
    pipeline: Any, captions: Sequence[str], device: torch.device, *, indices: dict[str, int], **options: Any
) -> Conditions:
    """Encode captions with diffusers' `encode_prompt`, and return its results at `indices` by name."""
    encoded = pipeline.encode_prompt(list(captions), device=device, **options)
    return {name: encoded[index] for name, index in indices.items()}


UNGUIDED: dict[str, Any] = {"num_images_per_prompt": 1, "do_classifier_free_guidance": False}
_encode_sd = partial(_encode_captions, indices={"text": 0}, **UNGUIDED)
_encode_sdxl = partial(_encode_captions, indices={"text": 0, "pooled": 2}, **UNGUIDED)
_encode_sd3 = partial(_encode_captions, indices={"text": 0, "pooled": 2}, prompt_2=None, prompt_3=None, **UNGUIDED)
_encode_flux = partial(_encode_captions, indices={"text": 0, "pooled": 1}, prompt_2=None)
_encode_flux2 = partial(_encode_captions, indices={"text": 0})


def _predict_unet(unet: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions) -> Tensor:
    added = {}
    if "pooled" in conditions:  # SDXL
        added = {"added_cond_kwargs": {"text_embeds": conditions["pooled"], "time_ids": conditions["sizes"]}}
    return unet(noisy, timesteps, conditions["text"], **added, return_dict=False)[0]


def _predict_sd3(transformer: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions) -> Tensor:
    return transformer(
        hidden_states=noisy,
        timestep=timesteps,
        encoder_hidden_states=conditions["text"],
        pooled_projections=conditions["pooled"],
        return_dict=False,
    )[0]


def _predict_flux(transformer: Any, noisy: Tensor, timesteps: Tensor, conditions: Conditions) -> Tensor:
    B, C, H, W = noisy.shape
    rows = noisy.view(B, C, H // 2, 2, W // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(B, (H // 2) * (W // 2), C * 4)
    positions = torch.zeros(H // 2, W // 2, 3, device=noisy.device, dtype=noisy.dtype)
    positions[..., 1] += torch.arange(H // 2, device=noisy.device)[:, None]
    positions[..., 2] += torch.arange(W // 2, device=noisy.device)[None, :]
    text = conditions["text"]
    guidance = conditions["guidance"] if transformer.config.guidance_embeds else None
    predicted: Tensor = transformer(
        hidden_states=rows,
        timestep=timesteps / FLUX_TIMESTEP_SCALE,
        guidance=guidance,
        pooled_projections=conditions["pooled"],
        encoder_hidden_states=text,
        txt_ids=torch.zeros(text.shape[1], 3, device=noisy.device, dtype=noisy.dtype),
        img_ids=positions.view(-1, 3),
        return_dict=False,
    )[0]
    return predicted.view(B, H // 2, W // 2, C, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(B, C, H, W)


def _predict_flux2(transformer: Any, noisy: Tensor, timesteps: Tensor, conditions: Conditions) -> Tensor:
    B, C, H, W = noisy.shape
    text, device = conditions["text"], noisy.device
    nothing, upto = torch.zeros(1, device=device, dtype=torch.long), partial(torch.arange, device=device)
    predicted: Tensor = transformer(
        hidden_states=noisy.flatten(2).transpose(1, 2),
        timestep=timesteps / FLUX_TIMESTEP_SCALE,
        guidance=conditions["guidance"] if transformer.config.guidance_embeds else None,
        encoder_hidden_states=text,
        txt_ids=torch.cartesian_prod(nothing, nothing, nothing, upto(text.shape[1])),
        img_ids=torch.cartesian_prod(nothing, upto(H), upto(W), nothing),
        return_dict=False,
    )[0]
    return predicted.transpose(1, 2).reshape(B, C, H, W)


UNET, FLOW = "UNet2DConditionModel", "FlowMatchEulerDiscreteScheduler"
TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
FAMILIES = (
    Family(
        *("sd", "StableDiffusionPipeline", "unet", UNET, "DDPMScheduler", 1, TEXT_ENCODERS[:1], True),
        *(_encode_sd, _predict_unet),
    ),
    Family(
        *("sdxl", "StableDiffusionXLPipeline", "unet", UNET, "DDPMScheduler", 1, TEXT_ENCODERS[:2], True),
        *(_encode_sdxl, _predict_unet),
    ),
    Family(
        *("sd3", "StableDiffusion3Pipeline", "transformer", "SD3Transformer2DModel", FLOW, 2, TEXT_ENCODERS, True),
        *(_encode_sd3, _predict_sd3),
    ),
    Family(
        *("flux", "FluxPipeline", "transformer", "FluxTransformer2DModel", FLOW, 2, TEXT_ENCODERS[:2], False),
        *(_encode_flux, _predict_flux),
    ),
    Family(
        *("flux2", "Flux2KleinPipeline", "transformer", "Flux2Transformer2DModel", FLOW, 1, TEXT_ENCODERS[:1], True),
        *(_encode_flux2, _predict_flux2, 2),
    ),
)


def find_family(pipeline: str) -> Family | None:
    return next((family for family in FAMILIES if family.pipeline == pipeline), None)
