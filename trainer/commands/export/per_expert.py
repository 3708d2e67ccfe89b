"""An adapter in the layout that vLLM and SGLang load: two matrices for each part of each expert, by checkpoint names.

    base_model.model.model.layers.0.mlp.experts.7.gate_proj.lora_A.weight  [R, H]
    base_model.model.model.layers.0.mlp.experts.7.gate_proj.lora_B.weight  [I, R]

The fused gate and up projections share A and have their own rows of B. Names are those of the base's checkpoint
(`block_sparse_moe.experts.7.w1`), where it stores experts one by one; else gate_proj, up_proj and down_proj.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.config import UserError
from trainer.contract.known_versions import require
from trainer.model.base import empty_model, load_model_config
from trainer.model.expert_forward import activation_of
from trainer.model.expert_layers import DOWN, GATE_UP, UP, expert_modules, expert_names, expert_shape, takes_all_tokens

PARTS = {GATE_UP: ("gate_proj", "up_proj"), UP: ("up_proj",), DOWN: ("down_proj",)}
STORED_AS = {"gate_proj": ("gate_proj", "w1"), "up_proj": ("up_proj", "w3", "w1"), "down_proj": ("down_proj", "w2")}
PREFIX = "base_model.model."


def write_per_expert(adapter: Path, output: Path, base_model: str, section: Any) -> None:
    """Write the adapter of the folder `adapter` in that layout to `output`; UserError for experts it cannot say."""
    settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    model = empty_model(load_model_config(base_model, section), section)
    tensors = load_file(adapter / "adapter_model.safetensors")
    layers = _pairs(tensors, model)
    ranks = {len(a) for a, _ in layers.values()}
    names = _StoredNames(model)
    made: dict[str, Tensor] = {name: value for name, value in tensors.items() if ".lora_" not in name}
    for path, (a, b) in layers.items():
        if len(ranks) > 1:  # which one scale for all cannot say
            b = b * _scale(settings, len(a))
        made |= _named(names.of_layer(path), a, b)
    if len(ranks) > 1:
        settings |= {"r": max(ranks), "lora_alpha": max(ranks), "use_rslora": False}
    modules = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in made if ".lora_" in name})
    settings |= {"target_modules": modules, "target_parameters": None, "rank_pattern": {}, "alpha_pattern": {}}
    save_file({name: value.contiguous() for name, value in made.items()}, output / "adapter_model.safetensors")
    (output / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _pairs(tensors: dict[str, Tensor], model: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """A [R, in] and B [out, R] of each layer, and of each part of each expert, by their paths in the model."""
    experts = expert_modules(model)
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name, a in tensors.items():
        path, found, rest = name.removeprefix(PREFIX).partition(".lora_A.")
        if not found:
            continue
        b = tensors[f"{PREFIX}{path}.lora_B.{rest}"]
        holder = path.replace(".base_layer", "")
        if holder in experts:
            pairs |= _of_experts(holder, experts[holder], _parameter(path, holder, experts[holder], tensors), a, b)
        else:
            pairs[path] = a, b
    return pairs


def _parameter(path: str, holder: str, module: Any, tensors: dict[str, Tensor]) -> str:
    """Which tensor of the experts PEFT means: it nests them, the first within the others."""
    names = expert_names(module)
    if path != holder:
        return names[0]
    nested = f"{PREFIX}{holder}.base_layer.lora_A.weight" in tensors
    if nested:
        return names[-1]
    width = tensors[f"{PREFIX}{holder}.lora_B.weight"].shape[0]
    fits = [name for name in names if width in expert_shape(module, name)[1:]]
    a_width = tensors[f"{PREFIX}{holder}.lora_A.weight"].shape[1]
    return next(name for name in fits if {width, a_width} == set(expert_shape(module, name)[1:]))


def _of_experts(path: str, module: Any, name: str, a: Tensor, b: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Each part of each expert, out of PEFT's matrices of all of them."""
    experts = expert_shape(module, name)[0]
    a_ERI = a.unflatten(0, (experts, -1))
    b_EOR = b.unflatten(1, (-1, experts)).permute(2, 0, 1)
    if takes_all_tokens(module):  # PEFT has A on the side of its outputs
        a_ERI, b_EOR = b_EOR.mT, a_ERI.mT
    gate = activation_of(module)
    rows = [b_EOR]
    if len(PARTS[name]) == 2:
        interleaved = gate is not None and gate.interleaved
        rows = [b_EOR[:, 0::2], b_EOR[:, 1::2]] if interleaved else list(b_EOR.chunk(2, dim=1))
    return {
        f"{path}.{index}.{part}": (a_ERI[index], b_OR[index])
        for part, b_OR in zip(PARTS[name], rows, strict=True)
        for index in range(experts)
    }


def _scale(settings: dict[str, Any], rank: int) -> float:
    alpha = float(settings["lora_alpha"])
    return alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank


def _named(path: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {f"{PREFIX}{path}.lora_A.weight": a.clone(), f"{PREFIX}{path}.lora_B.weight": b.clone()}


class _StoredNames:
    """How the base's checkpoint calls what the model in memory calls otherwise, by transformers' own conversion."""

    def __init__(self, model: Any) -> None:
        from transformers import core_model_loading

        self._model = model
        self._revert = require(core_model_loading, "revert_weight_conversion", "transformers")
        self._experts = set(expert_modules(model))
        self._of_experts: dict[str, dict[tuple[int, str], str]] = {}

    def of_layer(self, path: str) -> str:
        """The stored name, without `.weight`, of a layer, or of a part of one expert."""
        expert = re.fullmatch(r"(.*)\.(\d+)\.(gate_proj|up_proj|down_proj)", path)
        if expert is not None and expert[1] in self._experts:
            return self._of_expert(expert[1], int(expert[2]), expert[3])
        parameter = f"{path}.weight"
        stored = self._stored(parameter)
        return stored[0].removesuffix(".weight") if len(stored) == 1 else path

    def _of_expert(self, holder: str, index: int, part: str) -> str:
        if holder not in self._of_experts:
            found: dict[tuple[int, str], str] = {}
            module = self._model.get_submodule(holder)
            for name in expert_names(module):
                for stored in self._stored(f"{holder}.{name}"):
                    match = re.search(r"\.(\d+)\.(\w+)\.weight$", stored)
                    for each in PARTS[name] if match else ():
                        assert match is not None
                        if match[2] in STORED_AS[each][: 2 if name == GATE_UP else None]:
                            found[int(match[1]), each] = stored.removesuffix(".weight")
            self._of_experts[holder] = found
        return self._of_experts[holder].get((index, part), f"{holder}.{index}.{part}")

    def _stored(self, parameter: str) -> list[str]:
        try:
            weight = self._model.get_parameter(parameter)
        except AttributeError as error:
            raise UserError(
                f"{parameter}: is not in the base; name the one it was trained on with --base-model"
            ) from error
        empty = torch.empty(weight.shape, device="meta")
        return list(self._revert(self._model, {parameter: empty}))
