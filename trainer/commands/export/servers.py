"""Export adapters for vLLM and SGLang, which support fewer features than PEFT.

Both read PEFT's two files, but need one A and B per layer, the checkpoint's layer names, and the same rank
and alpha for all layers. Neither supports DoRA or fully trained weights. Everything else is converted:

    scale of every layer    lora_alpha / r, including rsLoRA and patterns (SGLang reads neither)
    experts                 gate, up and down per expert; SGLang uses these names if the checkpoint has
                            w1, w3, w2, and vLLM uses w1, w3, w2 for gpt-oss
    q, k, v and gate, up    SGLang stacks them, so it needs all or none of a group, all with rank r;
                            missing factors are filled with zeros
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.checkpoint.adapter_files import WEIGHTS
from trainer.commands.export.factors import PEFT_PREFIX, read_factors
from trainer.config import UserError
from trainer.config.adapter_settings import SETTINGS_FILE, read_adapter_settings
from trainer.model.base import load_model_config
from trainer.model.served_layers import SERVER_NAMES, describe_exclusion, find_unapplied_layers

EXPERT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
NUMBERED_EXPERT_NAMES = {name: number for number, name in EXPERT_NAMES.items()}
NUMBERED_IN_VLLM = ("gpt_oss",)
"""Model types with all experts in one tensor, for which vLLM expects w1, w2 and w3 in adapters."""
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Allowed values of --max-lora-rank."""
EXPORT_MERGED_FIX = "export the merged model with --format hf"


def write_for_server(folder: Path, server: str, base_model: str, section: Any) -> None:
    """Rewrite the adapter in `folder` for `server`.

    Raises UserError, before writing anything, if the server does not support the adapter.
    """
    check_adapter_supported(folder, server)
    model_type = load_model_config(base_model, section).get_text_config().model_type
    factors = read_factors(folder, base_model, section, complete_groups=server == "sglang")
    names: dict[str, str] = EXPERT_NAMES if server == "sglang" else {}
    if server == "vllm" and model_type in NUMBERED_IN_VLLM:
        names = NUMBERED_EXPERT_NAMES
    renamed = {}
    for layer, pair in factors.items():
        parent, _, part = layer.rpartition(".")
        renamed[f"{parent}.{names.get(part, part)}" if ".experts." in layer else layer] = pair
    factors = renamed
    if unapplied := find_unapplied_layers(server, model_type, factors):
        raise UserError(
            f"--format {server}: {SERVER_NAMES[server]} does not apply adapters of {', '.join(unapplied)}; "
            f"to train without them, {'; '.join(map(describe_exclusion, unapplied))}; or {EXPORT_MERGED_FIX}"
        )
    rank, scales = max(len(pair.a_RI) for pair in factors.values()), {pair.scale for pair in factors.values()}
    scale = scales.pop() if len(scales) == 1 else 1.0  # different scales are folded into B
    tensors: dict[str, Tensor] = {}
    for layer, pair in factors.items():
        pair = pair.rescale(scale)
        pair = pair.pad_rank(rank) if server == "sglang" else pair
        tensors[f"{PEFT_PREFIX}{layer}.lora_A.weight"] = pair.a_RI.clone(memory_format=torch.contiguous_format)
        tensors[f"{PEFT_PREFIX}{layer}.lora_B.weight"] = pair.b_OR.clone(memory_format=torch.contiguous_format)
    settings = read_adapter_settings(folder)
    alpha = scale * rank
    settings |= {"r": rank, "lora_alpha": int(alpha) if alpha == int(alpha) else alpha, "use_rslora": False}
    settings |= {"target_modules": sorted({layer.rpartition(".")[2] for layer in factors}), "target_parameters": None}
    settings |= {"rank_pattern": {}, "alpha_pattern": {}, "exclude_modules": None}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def build_lora_arguments(server: str, folder: Path, name: str) -> list[str]:
    adapter = f"{name}={folder}"
    if server == "sglang":
        return ["--enable-lora", "--lora-paths", adapter]
    rank = read_adapter_settings(folder)["r"]
    max_rank = next((allowed for allowed in VLLM_RANKS if allowed >= rank), rank)
    with safe_open(str(folder / WEIGHTS), framework="pt") as file:
        experts = any(".experts." in key for key in file.keys())
    flag = ["--enable-mixed-moe-lora-format"] * experts
    return ["--enable-lora", "--max-lora-rank", str(max_rank), *flag, "--lora-modules", adapter]


def check_adapter_supported(folder: Path, server: str) -> None:
    """Raise UserError if the adapter uses DoRA or has tensors other than A and B of linear layers."""
    settings = read_adapter_settings(folder)
    name = SERVER_NAMES[server]
    if settings.get("use_dora"):
        raise UserError(f"--format {server}: {name} does not support DoRA; {EXPORT_MERGED_FIX}")
    others = [
        key.removeprefix(PEFT_PREFIX)
        for key in load_file(folder / "adapter_model.safetensors")
        if not re.search(r"\.lora_[AB]\.weight$", key)
    ]
    if others:
        raise UserError(
            f"--format {server}: {name} only supports A and B of linear layers, but the adapter has {others[0]} (from "
            f"lora.modules_to_save, model.added_tokens or an embedding); {EXPORT_MERGED_FIX}"
        )
