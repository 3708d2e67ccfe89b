"""Convert adapters to the formats of diffusers and of kohya's scripts; ComfyUI also reads the latter.

kohya: a layer's name is its path in the model's original implementation, with underscores for dots. Next to
the factors `lora_down` and `lora_up`, a layer has a tensor `alpha`; the adapter is scaled by alpha / rank. If the
original has one matrix where diffusers has several (queries, keys, values), their factors are combined exactly:
downs are stacked, ups are placed along the diagonal, and ranks and alphas add up.

Sources: tensor names in the checkpoints of SD3.5, FLUX.1 and FLUX.2; kohya-ss/sd-scripts, networks/lora_flux.py and
lora_sd3.py.
"""

import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.config import UserError
from trainer.config.adapter_settings import read_adapter_settings
from trainer.config.yaml_core import read_yaml
from trainer.contract.whole_files import apply_umask
from trainer.tasks.images.pipeline import Pipeline

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
"""File name that diffusers' `load_lora_weights` expects."""
PEFT_PREFIX = "base_model.model."
METADATA = "lora_adapter_metadata"
"""Metadata key under which diffusers stores PEFT's settings."""
DIFFUSERS_SETTINGS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "target_modules")
KOHYA_NAMES_FILE = Path(__file__).with_name("kohya.yaml")


def write_for_diffusers(folder: Path) -> None:
    """Write `pytorch_lora_weights.safetensors` next to PEFT's file, with diffusers' tensor names and settings."""
    tensors, settings = read_tensors(folder), read_adapter_settings(folder)
    part = next(iter(tensors)).partition(".")[0]
    layers = {name.removeprefix(f"{part}.").partition(".lora_")[0] for name in tensors if ".lora_A" in name}
    metadata = {f"{part}.{name}": settings[name] for name in DIFFUSERS_SETTINGS if name in settings}
    metadata[f"{part}.target_modules"] = sorted(layers)
    text = {"format": "pt", METADATA: json.dumps(metadata, indent=2, sort_keys=True)}
    save_file(tensors, folder / DIFFUSERS_FILE, metadata=text)
    apply_umask(folder / DIFFUSERS_FILE)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the adapter's tensors, named by pipeline component and layer."""
    tensors: dict[str, Tensor] = load_file(folder / "adapter_model.safetensors")
    return {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}


@cache
def load_kohya_names() -> dict[str, dict[str, Any]]:
    return read_yaml(KOHYA_NAMES_FILE).tree


def convert_to_kohya(folder: Path, pipeline: Pipeline) -> dict[str, Tensor]:
    """Return the adapter in `folder` as kohya tensors. Raises UserError for DoRA, patterns or an unknown layer."""
    settings, factors = read_adapter_settings(folder), defaultdict[str, dict[str, Tensor]](dict)
    if settings.get("use_dora"):
        problem = "programs that read kohya's format do not agree on DoRA's magnitudes"
        fix = "use --format peft for diffusers, or --format hf for the complete pipeline"
        raise UserError(f"lora.dora=true: {problem}; {fix}")
    for key in ("rank_pattern", "alpha_pattern"):
        if value := settings.get(key):
            raise UserError(f"{folder}: adapter_config.json {key}={value}: not in kohya's format; use --format peft")
    for name, tensor in read_tensors(folder).items():
        path, _, factor = name.partition(".lora_")
        factors[path]["down" if factor[0] == "A" else "up"] = tensor
    groups: dict[str, dict[int, str]] = defaultdict(dict)
    members: dict[str, tuple[str, ...]] = {}
    for path in factors:
        name, index, layers = _find_kohya_layer(path, pipeline)
        groups[name][index] = path
        members[name] = layers
    kohya: dict[str, Tensor] = {}
    for name, paths in groups.items():
        downs = [factors[path]["down"] for _, path in sorted(paths.items())]
        ups = {index: factors[path]["up"] for index, path in paths.items()}
        rank = downs[0].shape[0]
        scale = float(settings["lora_alpha"]) * (rank**0.5 if settings.get("use_rslora") else 1.0)
        key = name.replace(".", "_")
        if len(members[name]) == 1:
            down, up = downs[0], ups[0]
        else:
            down, up = torch.cat(downs), _build_block_diagonal(ups, members[name], pipeline)
        kohya[f"{key}.lora_down.weight"], kohya[f"{key}.lora_up.weight"] = down.contiguous(), up.contiguous()
        kohya[f"{key}.alpha"] = torch.tensor(scale * len(downs))
    return kohya


def _find_kohya_layer(path: str, pipeline: Pipeline) -> tuple[str, int, tuple[str, ...]]:
    """Return the layer's kohya name, its index among the layers combined under this name, and these layers."""
    layer = path.partition(".")[2]
    if pipeline.family.name not in load_kohya_names():
        return f"lora_unet.{layer}", 0, (layer,)
    pieces = layer.split(".", 2)
    blocks = load_kohya_names()[pipeline.family.name].get(pieces[0], {"name": "", "layers": {}})
    for name, layers in blocks["layers"].items():
        combined = tuple(layers.split())
        if pieces[-1] in combined:
            return f"lora_unet.{blocks['name']}.{pieces[1]}.{name}", combined.index(pieces[-1]), combined
    raise UserError(
        f"{layer}: this adapted layer has no name in kohya's format; use --format peft for diffusers, or train only "
        "attention and feed-forward layers (lora.target_modules: all-linear)"
    )


def _build_block_diagonal(ups: dict[int, Tensor], combined: tuple[str, ...], pipeline: Pipeline) -> Tensor:
    """Combine `lora_up` factors into a block-diagonal matrix; rows of layers without an adapter are zero."""
    settings = pipeline.settings
    inner = int(settings["num_attention_heads"]) * int(settings["attention_head_dim"])
    widths = [4 * inner if name == "proj_mlp" else inner for name in combined]
    dtype = next(iter(ups.values())).dtype
    blocks = [ups.get(index, torch.zeros(width, 0, dtype=dtype)) for index, width in enumerate(widths)]
    return torch.block_diag(*blocks)
