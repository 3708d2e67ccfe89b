"""The adapter as diffusers loads it."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.config.adapter_settings import read_adapter_settings
from trainer.contract.whole_files import apply_umask
from trainer.tasks.images.pipeline import Pipeline

DIFFUSERS = "pytorch_lora_weights.safetensors"
"""The name that diffusers' `load_lora_weights` looks for."""
PEFT_PREFIX = "base_model.model."
TEXT_MODEL = "text_model."
METADATA = "lora_adapter_metadata"
"""Under which diffusers keeps the settings of PEFT that belong to the weights."""
OF_DIFFUSERS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "target_modules")


def write_for_diffusers(folder: Path, pipeline: Pipeline) -> None:
    """`pytorch_lora_weights.safetensors` beside PEFT's file: its tensors under the pipeline's names, and settings."""
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
    """The adapter's tensors by part of the pipeline and layer."""
    found: dict[str, Tensor] = load_file(folder / "adapter_model.safetensors")
    return {_old_name(name.removeprefix(PEFT_PREFIX)): each for name, each in found.items()}


def _old_name(name: str) -> str:
    """Text encoders with a part `text_model`, which not every version of transformers has, and which readers expect."""
    part, _, rest = name.partition(".")
    if part.startswith("text_encoder") and not rest.startswith(TEXT_MODEL):
        return f"{part}.{TEXT_MODEL}{rest}"
    return name


def _layer_names(tensors: dict[str, Tensor], part: str) -> set[str]:
    """Without the part that only some versions of transformers have: PEFT compares how paths end."""
    own = [name.removeprefix(f"{part}.") for name in tensors if name.startswith(f"{part}.") and ".lora_A" in name]
    return {name.removeprefix(TEXT_MODEL).partition(".lora_")[0] for name in own}
