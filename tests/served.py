"""The model that a server computes from an exported adapter, by the names and scales that its loader reads.

vLLM       vllm/lora/lora_model.py, peft_helper.py, model_executor/models/gpt_oss.py (`get_expert_mapping`)
SGLang     python/sglang/srt/lora/lora.py, utils.py, mem_pool.py
"""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import core_model_loading

from trainer.config.adapter_settings import read_adapter_settings

NUMBERS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
PARTS = {number: part for part, number in NUMBERS.items()}
STACKED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def serve(base: Any, server: str, folder: Path) -> Any:
    """Return the base with the updates of the adapter in `folder`, added to its checkpoint's tensors."""
    kind = base.config.get_text_config().model_type
    stored = {
        name: value.clone()
        for name, value in core_model_loading.revert_weight_conversion(base, dict(base.state_dict())).items()
    }
    settings, tensors = read_adapter_settings(folder), load_file(folder / "adapter_model.safetensors")
    assert not settings["use_rslora"] and not settings.get("use_dora"), "one scale for all"
    layers = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in tensors}
    for layer in layers:
        a, b = (tensors[f"base_model.model.{layer}.lora_{side}.weight"].float() for side in "AB")
        if server == "sglang":
            _check_stack(layer, len(a), layers, settings, stored)
        assert len(a) <= settings["r"], "there is room for r rows"
        update = settings["lora_alpha"] / settings["r"] * (a.mT @ b.mT if settings["fan_in_fan_out"] else b @ a)
        _find_weight(stored, layer, server, kind).add_(update)
    config, attention = base.config, base.config._attn_implementation
    return type(base).from_pretrained(None, config=config, state_dict=stored, attn_implementation=attention).eval()


def _check_stack(layer: str, rows: int, layers: set[str], settings: dict[str, Any], stored: dict[str, Any]) -> None:
    parent, _, own = layer.rpartition(".")
    assert own in settings["target_modules"], "others are left out"
    assert rows == settings["r"], "each part of a stack has r rows"
    others = {f"{parent}.{name}" for group in STACKED if own in group for name in group}
    assert all(other in layers for other in others if f"{other}.weight" in stored), "all of a stack or none"


def _find_weight(stored: dict[str, Any], layer: str, server: str, kind: str) -> torch.Tensor:
    """Return the view of the stored tensor [out, in] that has this name in the server."""
    if not (expert := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)", layer)):
        return stored[f"{layer}.weight"]
    holder, number, part = expert.groups()
    if server == "sglang" and f"{holder}.{number}.{NUMBERS[part]}.weight" in stored:
        part = NUMBERS[part]
    if f"{holder}.{number}.{part}.weight" in stored:
        return stored[f"{holder}.{number}.{part}.weight"]
    if (server, kind) == ("vllm", "gpt_oss"):
        part = PARTS[part]
    names = ("down_proj",) if part == "down_proj" else ("gate_up_proj", part)
    name = next(name for base in names for name in (f"{holder}.{base}", f"{holder}.{base}.weight") if name in stored)
    weight: torch.Tensor = stored[name][int(number)]
    weight = weight.mT if kind in ("gpt_oss", "llama4", "llama4_text") else weight
    if "gate_up" not in name:
        return weight
    halves = (weight[0::2], weight[1::2]) if kind == "gpt_oss" else weight.chunk(2)
    return halves[0 if part == "gate_proj" else 1]
