"""The adapter in the format that diffusers loads."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.config.adapter_settings import read_adapter_settings
from trainer.contract.whole_files import apply_umask
from trainer.tasks.images.pipeline import Pipeline

DIFFUSERS = "pytorch_lora_weights.safetensors"
"""File name that diffusers' `load_lora_weights` expects."""
PEFT_PREFIX = "base_model.model."
TEXT_MODEL = "text_model."
METADATA = "lora_adapter_metadata"
"""Metadata key under which diffusers stores PEFT's settings."""
OF_DIFFUSERS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "target_modules")


def write_for_diffusers(folder: Path, pipeline: Pipeline) -> None:
    """Write `pytorch_lora_weights.safetensors` next to PEFT's file: tensors under diffusers' names, and settings."""
    tensors = tensors_by_part(folder)
    settings = read_adapter_settings(folder)
    metadata: dict[str, Any] = {}
    for part in sorted({name.partition(".")[0] for name in tensors}):  # denoiser, text encoders
        metadata |= {f"{part}.{name}": settings[name] for name in OF_DIFFUSERS if name in settings}
        metadata[f"{part}.target_modules"] = sorted(_layer_names(tensors, part))
    text = {"format": "pt", METADATA: json.dumps(metadata, indent=2, sort_keys=True)}
    save_file(tensors, folder / DIFFUSERS, metadata=text)
    apply_umask(folder / DIFFUSERS)


def tensors_by_part(folder: Path) -> dict[str, Tensor]:
    """Return the adapter's tensors, named by component of the pipeline and layer."""
    found: dict[str, Tensor] = load_file(folder / "adapter_model.safetensors")
    return {_old_name(name.removeprefix(PEFT_PREFIX)): each for name, each in found.items()}


def _old_name(name: str) -> str:
    """Insert `text_model` into names of text encoders: readers expect it, and not every transformers version has it."""
    part, _, rest = name.partition(".")
    if part.startswith("text_encoder") and not rest.startswith(TEXT_MODEL):
        return f"{part}.{TEXT_MODEL}{rest}"
    return name


def _layer_names(tensors: dict[str, Tensor], part: str) -> set[str]:
    # Without `text_model`, which only some versions of transformers have: PEFT compares the ends of paths.
    own = [name.removeprefix(f"{part}.") for name in tensors if name.startswith(f"{part}.") and ".lora_A" in name]
    return {name.removeprefix(TEXT_MODEL).partition(".lora_")[0] for name in own}
