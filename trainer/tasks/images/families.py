"""The supported pipelines: how captions are encoded and how their denoisers are called.

Shapes: B images, C channels, H and W height and width of latents, T tokens of a caption.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Conditions = dict[str, Tensor]
FLUX_TIMES = 1000.0  # scheduler timesteps per unit of the model's time


@dataclass(frozen=True)
class Family:
    """A kind of pipeline."""

    name: str
    pipeline: str
    """Class of the pipeline in diffusers."""
    denoiser: str
    """Name of the component that is trained."""
    model: str
    """Class of the denoiser."""
    scheduler: str
    """Class of the scheduler that adds noise in training."""
    patch: int
    """Sides of latents must be multiples of this."""
    text_encoders: tuple[str, ...]
    guided: bool
    """Whether samples are drawn with a negative prompt (classifier-free guidance)."""
    encode: Callable[[Any, Sequence[str], torch.device], Conditions]
    """(pipeline, captions, device) -> conditions, each [B, ...]."""
    encode_trained: Callable[[Any, Sequence[str], Conditions], Conditions] | None
    """(pipeline without frozen encoders, captions, cached conditions) -> conditions from the trained encoders; None if
    no encoder can be trained."""
    predict: Callable[[nn.Module, Tensor, Tensor, Conditions], Tensor]
    """(denoiser, noisy latents [B, C, H, W], timesteps of the scheduler [B], conditions) -> prediction [B, C, H, W]."""
    packed: int = 1
    """Side of the squares of VAE latents that are packed into the channels of one latent."""

    @property
    def flow(self) -> bool:
        """Whether the model is trained by flow matching."""
        return self.scheduler == "FlowMatchEulerDiscreteScheduler"

    def pipeline_arguments(self, conditions: Conditions, *, negative: Conditions | None = None) -> Conditions:
        """Return the arguments that replace prompts in a call of the pipeline."""
        given = {PIPELINE_NAMES[name]: value for name, value in conditions.items()}
        if negative is not None and self.guided:
            given |= {f"negative_{PIPELINE_NAMES[name]}": value for name, value in negative.items()}
        return given


PIPELINE_NAMES = {"text": "prompt_embeds", "pooled": "pooled_prompt_embeds"}


def _encode_sd(pipeline: Any, captions: Sequence[str], device: torch.device) -> Conditions:
    text, _ = pipeline.encode_prompt(list(captions), device, 1, False)
    return {"text": text}


def _encode_sdxl(pipeline: Any, captions: Sequence[str], device: torch.device) -> Conditions:
    text, _, pooled, _ = pipeline.encode_prompt(list(captions), device=device, do_classifier_free_guidance=False)
    return {"text": text, "pooled": pooled}


def _encode_sd3(pipeline: Any, captions: Sequence[str], device: torch.device) -> Conditions:
    text, _, pooled, _ = pipeline.encode_prompt(
        list(captions), None, None, device=device, do_classifier_free_guidance=False
    )
    return {"text": text, "pooled": pooled}


def _encode_flux(pipeline: Any, captions: Sequence[str], device: torch.device) -> Conditions:
    text, pooled, _ = pipeline.encode_prompt(list(captions), None, device=device)
    return {"text": text, "pooled": pooled}


def _trained_sd(pipeline: Any, captions: Sequence[str], cached: Conditions) -> Conditions:
    encode = _encode_sdxl if "pooled" in cached else _encode_sd
    return encode(pipeline, captions, cached["text"].device)


def _trained_sd3(pipeline: Any, captions: Sequence[str], cached: Conditions) -> Conditions:
    found = _encode_sd3(pipeline, captions, cached["text"].device)
    of_clip = pipeline.tokenizer_max_length  # followed by T5's tokens
    text = torch.cat([found["text"][:, :of_clip].to(cached["text"].dtype), cached["text"][:, of_clip:]], dim=1)
    return {"text": text, "pooled": found["pooled"]}


def _trained_flux(pipeline: Any, captions: Sequence[str], cached: Conditions) -> Conditions:
    pooled = pipeline._get_clip_prompt_embeds(list(captions), device=cached["pooled"].device)
    return {"pooled": pooled}  # the text is from T5, which is frozen


def _encode_flux2(pipeline: Any, captions: Sequence[str], device: torch.device) -> Conditions:
    text, _ = pipeline.encode_prompt(list(captions), device=device)
    return {"text": text}


def _predict_sd(unet: nn.Module, noisy: Tensor, times: Tensor, conditions: Conditions) -> Tensor:
    predicted: Tensor = unet(noisy, times, conditions["text"], return_dict=False)[0]
    return predicted


def _predict_sdxl(unet: nn.Module, noisy: Tensor, times: Tensor, conditions: Conditions) -> Tensor:
    added = {"text_embeds": conditions["pooled"], "time_ids": conditions["sizes"]}
    predicted: Tensor = unet(noisy, times, conditions["text"], added_cond_kwargs=added, return_dict=False)[0]
    return predicted


def _predict_sd3(transformer: nn.Module, noisy: Tensor, times: Tensor, conditions: Conditions) -> Tensor:
    predicted: Tensor = transformer(
        hidden_states=noisy,
        timestep=times,
        encoder_hidden_states=conditions["text"],
        pooled_projections=conditions["pooled"],
        return_dict=False,
    )[0]
    return predicted


def _predict_flux(transformer: Any, noisy: Tensor, times: Tensor, conditions: Conditions) -> Tensor:
    B, C, H, W = noisy.shape
    rows = noisy.view(B, C, H // 2, 2, W // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(B, (H // 2) * (W // 2), C * 4)
    places = torch.zeros(H // 2, W // 2, 3, device=noisy.device, dtype=noisy.dtype)
    places[..., 1] += torch.arange(H // 2, device=noisy.device)[:, None]
    places[..., 2] += torch.arange(W // 2, device=noisy.device)[None, :]
    text = conditions["text"]
    guidance = conditions["guidance"] if transformer.config.guidance_embeds else None
    predicted: Tensor = transformer(
        hidden_states=rows,
        timestep=times / FLUX_TIMES,
        guidance=guidance,
        pooled_projections=conditions["pooled"],
        encoder_hidden_states=text,
        txt_ids=torch.zeros(text.shape[1], 3, device=noisy.device, dtype=noisy.dtype),
        img_ids=places.view(-1, 3),
        return_dict=False,
    )[0]
    return predicted.view(B, H // 2, W // 2, C, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(B, C, H, W)


def _predict_flux2(transformer: Any, noisy: Tensor, times: Tensor, conditions: Conditions) -> Tensor:
    B, C, H, W = noisy.shape
    text, device = conditions["text"], noisy.device
    nothing, upto = torch.zeros(1, device=device, dtype=torch.long), partial(torch.arange, device=device)
    predicted: Tensor = transformer(
        hidden_states=noisy.flatten(2).transpose(1, 2),
        timestep=times / FLUX_TIMES,
        guidance=conditions["guidance"] if transformer.config.guidance_embeds else None,
        encoder_hidden_states=text,
        txt_ids=torch.cartesian_prod(nothing, nothing, nothing, upto(text.shape[1])),
        img_ids=torch.cartesian_prod(nothing, upto(H), upto(W), nothing),
        return_dict=False,
    )[0]
    return predicted.transpose(1, 2).reshape(B, C, H, W)


UNET, FLOW = "UNet2DConditionModel", "FlowMatchEulerDiscreteScheduler"
CLIP_T5 = ("text_encoder", "text_encoder_2", "text_encoder_3")
FAMILIES = (
    Family(
        *("sd", "StableDiffusionPipeline", "unet", UNET, "DDPMScheduler", 1, CLIP_T5[:1], True),
        *(_encode_sd, _trained_sd, _predict_sd),
    ),
    Family(
        *("sdxl", "StableDiffusionXLPipeline", "unet", UNET, "DDPMScheduler", 1, CLIP_T5[:2], True),
        *(_encode_sdxl, _trained_sd, _predict_sdxl),
    ),
    Family(
        *("sd3", "StableDiffusion3Pipeline", "transformer", "SD3Transformer2DModel", FLOW, 2, CLIP_T5, True),
        *(_encode_sd3, _trained_sd3, _predict_sd3),
    ),
    Family(
        *("flux", "FluxPipeline", "transformer", "FluxTransformer2DModel", FLOW, 2, CLIP_T5[:2], False),
        *(_encode_flux, _trained_flux, _predict_flux),
    ),
    Family(
        *("flux2", "Flux2KleinPipeline", "transformer", "Flux2Transformer2DModel", FLOW, 1, CLIP_T5[:1], True),
        *(_encode_flux2, None, _predict_flux2, 2),
    ),
)


def find_family(pipeline: str) -> Family | None:
    """Return the family of a pipeline class, or None if it is not supported."""
    return next((family for family in FAMILIES if family.pipeline == pipeline), None)
