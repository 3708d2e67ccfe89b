"""Encode images with the VAE and captions with the text encoders, into a folder of safetensors files."""

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pixel_unshuffle

from trainer.contract.whole_files import apply_umask
from trainer.tasks.images.families import Conditions
from trainer.tasks.images.pipeline import Pipeline
from trainer.tasks.images.sizes import ResizeAndCrop
from trainer.tasks.images.source_images import SourceImage

IMAGES_PER_FILE = 512
CAPTION_BATCH_SIZE = 4
LOG_EVERY = 100


@torch.no_grad()
def encode_images(
    pipeline: Pipeline,
    images: Sequence[SourceImage],
    resizes: Sequence[ResizeAndCrop],
    captions: Sequence[str],
    folder: Path,
    *,
    flip: bool,
    log: Callable[[str], None] = lambda line: None,
) -> None:
    """Write captions-N.safetensors and latents-N.safetensors; the text encoders are freed before the VAE is loaded.

    Tensors: `I.mean`, `I.std` (and `I.flipped.mean` ...) [C, H, W] for image I, fp32; `I.NAME` for caption I, in the
    compute dtype of the text encoders (bf16 on a GPU).
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _write_tensors(folder, "captions", _encode_captions(pipeline, captions, device))
    _write_tensors(folder, "latents", _encode_images(pipeline, images, resizes, device, flip=flip, log=log))
    apply_umask(folder)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _write_tensors(folder: Path, name: str, tensors: Iterator[tuple[int, dict[str, Tensor]]]) -> None:
    for number, group in groupby(tensors, key=lambda entry: entry[0] // IMAGES_PER_FILE):
        values = {f"{index}.{key}": value for index, encoded in group for key, value in encoded.items()}
        values = {key: value.cpu().contiguous().clone() for key, value in values.items()}
        save_file(values, folder / f"{name}-{number:04d}.safetensors")


def _encode_captions(
    pipeline: Pipeline, captions: Sequence[str], device: torch.device
) -> Iterator[tuple[int, Conditions]]:
    if pipeline.folder is None:
        for index, caption in enumerate(captions):
            yield index, build_random_conditions(pipeline, caption)
        return
    encoder = pipeline.load_encoder_pipeline(torch.bfloat16 if device.type == "cuda" else torch.float32).to(device)
    for start in range(0, len(captions), CAPTION_BATCH_SIZE):
        part = captions[start : start + CAPTION_BATCH_SIZE]
        encoded = pipeline.family.encode(encoder, part, device)
        for offset, caption in enumerate(part):
            conditions = {name: value[offset] for name, value in encoded.items()}
            if not caption and encoder.config.get("force_zeros_for_empty_prompt"):
                # SDXL's pipeline uses zeros as the empty negative prompt.
                conditions = {name: torch.zeros_like(value) for name, value in conditions.items()}
            yield start + offset, conditions


def _encode_images(
    pipeline: Pipeline,
    images: Sequence[SourceImage],
    resizes: Sequence[ResizeAndCrop],
    device: torch.device,
    *,
    flip: bool,
    log: Callable[[str], None],
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    vae = None if pipeline.folder is None else load_vae(pipeline, device)
    for index, (image, resize) in enumerate(zip(images, resizes, strict=True)):
        pixels = image_to_tensor(resize.apply(image.open()))
        latent: dict[str, Tensor] = {}
        for name, shown in (("", pixels), ("flipped.", pixels.flip(-1))) if flip else (("", pixels),):
            mean, std = _build_random_latent(pipeline, shown) if vae is None else encode_latent(vae, shown.to(device))
            latent |= {f"{name}mean": mean, f"{name}std": std}
        if (index + 1) % LOG_EVERY == 0:
            log(f"{index + 1:,} of {len(images):,} images encoded")
        yield index, latent


def load_vae(pipeline: Pipeline, device: torch.device) -> Any:
    """Load the VAE in fp32, because SDXL's VAE overflows in fp16."""
    import diffusers

    assert pipeline.folder is not None
    folder = pipeline.folder / "vae"
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("_class_name", "AutoencoderKL")
    with pipeline.convert_read_errors("its VAE"):
        vae = getattr(diffusers, kind).from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        vae.to("cpu")  # raises if weights are missing from the files and thus still on the meta device
    return vae.to(device).eval()


def image_to_tensor(image: Any) -> Tensor:
    """Return an image's pixels as a tensor [3, H, W] in [-1, 1]."""
    return torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1) / 127.5 - 1.0


def encode_latent(vae: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation [C, H, W] of the normalized latent, (z - shift) * scale.

    FLUX.2's VAE normalizes squares of 2 x 2 latents with the constant statistics of a batch norm instead.
    """
    distribution = vae.encode(pixels[None]).latent_dist
    if hasattr(vae, "bn"):
        mean, std = (pixel_unshuffle(value[0], 2) for value in (distribution.mean, distribution.std))
        shift, scale = (value.view(-1, 1, 1) for value in (vae.bn.running_mean, vae.bn.running_var))
        deviation = (scale + vae.config.batch_norm_eps).sqrt()
        return (mean - shift) / deviation, std / deviation
    scale, shift = vae.config.scaling_factor, vae.config.shift_factor or 0.0
    return (distribution.mean[0] - shift) * scale, distribution.std[0] * scale


def _build_random_latent(pipeline: Pipeline, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and standard deviation of a random pipeline's latent, which depends only on the pixels."""
    small = torch.nn.functional.avg_pool2d(pixels[None], pipeline.downsampling)[0].mean(0, keepdim=True)
    generator = torch.Generator().manual_seed(int((small.double().sum() * 1e6).item()) % 2**31)
    mean = torch.randn(pipeline.channels, *small.shape[1:], generator=generator) + small
    return mean, torch.full_like(mean, 0.01)


def build_random_conditions(pipeline: Pipeline, caption: str) -> Conditions:
    import xxhash

    generator = torch.Generator().manual_seed(xxhash.xxh32_intdigest(caption.encode()))
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in pipeline.caption_shapes.items()}


def describe_truncated_captions(pipeline: Pipeline, captions: Sequence[str]) -> list[str]:
    """Return a warning for each token limit that captions exceed, with the text encoders that have this limit."""
    import diffusers
    import transformers

    if pipeline.folder is None:
        return []
    components = pipeline.index
    encode = inspect.signature(getattr(diffusers, pipeline.family.pipeline).encode_prompt)
    encoders: dict[int, list[str]] = {}
    too_long: dict[int, int] = {}
    for name in pipeline.family.text_encoders:
        part = name.replace("text_encoder", "tokenizer")
        if None in components.get(part, [None]):
            continue
        with pipeline.convert_read_errors(f"its {part}"):
            tokenizer: Any = getattr(transformers, components[part][1]).from_pretrained(pipeline.folder / part)
        is_clip = components[part][1].startswith("CLIP")
        limit = tokenizer.model_max_length if is_clip else encode.parameters["max_sequence_length"].default
        lengths = [len(ids) for ids in tokenizer(list(captions)).input_ids]
        encoders.setdefault(limit, []).append(name)
        too_long[limit] = max(too_long.get(limit, 0), sum(length > limit for length in lengths))
    more = [f"; up to {limit} for {' and '.join(names)}" for limit, names in encoders.items() if not too_long[limit]]
    return [
        f"{count:,} of {len(captions):,} captions are truncated to {limit} tokens for "
        f"{' and '.join(encoders[limit])}{''.join(more)}"
        for limit, count in too_long.items()
        if count
    ]
