"""The weight updates that each server computes from an exported adapter, by the server's own rules.

Written from the servers' loaders and independent of the export, so that a mistake in either is found:

    vLLM       vllm/lora/lora_model.py, peft_helper.py, lora_weights.py
    SGLang     python/sglang/srt/lora/lora.py, utils.py, mem_pool.py
    llama.cpp  src/llama-adapter.cpp, convert_lora_to_gguf.py

Each yields the name of a layer in the base's checkpoint and the update of its weight [out, in]; raises RuntimeError for
what the server would refuse or silently ignore.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from trainer.config.adapter_settings import read_adapter_settings

Update = tuple[str, Tensor]
TRANSPOSED_EXPERTS = ("gpt_oss", "llama4", "llama4_text")
"""Models with checkpoints that store experts [E, in, out]."""
INTERLEAVED_EXPERTS = ("gpt_oss",)
"""Models with checkpoints that interleave the rows of gate and up."""
PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Parts of an expert -> their names in checkpoints such as Mixtral's."""
VLLM_PARTS = {"gpt_oss": {number: part for part, number in PARTS.items()}}
"""vLLM's names of experts' parts in adapters of models with all experts in one tensor, if not gate_proj etc.
(`get_expert_mapping` of vllm/model_executor/models/gpt_oss.py)."""
STACKED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
ONE_EXPERT = re.compile(r"(.*\.experts\.\d+)\.(\w+)")


def read_vllm(folder: Path, stored: dict[str, Tensor], config: Any) -> Iterator[Update]:
    """Read as vLLM: scale alpha / r, or alpha / sqrt(r) for rsLoRA; each A has at most r rows."""
    parts = VLLM_PARTS.get(config.get_text_config().model_type, {part: part for part in PARTS})
    settings = read_adapter_settings(folder)
    for forbidden in ("modules_to_save", "use_dora"):
        if settings.get(forbidden):
            raise RuntimeError(f"adapter_config.json: vLLM refuses {forbidden}")
    rank, alpha = settings["r"], settings["lora_alpha"]
    scale = alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank
    for layer, a, b in _pairs(folder):
        if len(a) > rank:
            raise RuntimeError(f"{layer}: rank {len(a)}, but vLLM allocates r={rank}")
        expert = ONE_EXPERT.fullmatch(layer)
        if expert is not None and f"{layer}.weight" not in stored:
            if expert[2] not in parts:
                raise RuntimeError(f"{layer}: vLLM names the parts of these experts {', '.join(parts)}")
            layer = f"{expert[1]}.{parts[expert[2]]}"
        yield layer, scale * (a.mT @ b.mT if settings["fan_in_fan_out"] else b @ a)


def read_sglang(folder: Path, stored: dict[str, Tensor], _config: Any) -> Iterator[Update]:
    """Read as SGLang: scale always alpha / r; q, k, v and gate, up are stacked, with r rows of A each."""
    settings = read_adapter_settings(folder)
    rank, scale = settings["r"], settings["lora_alpha"] / settings["r"]
    pairs = {layer: (a, b) for layer, a, b in _pairs(folder)}
    targets = set(settings["target_modules"])
    for layer, (a, b) in pairs.items():
        parent, _, own = layer.rpartition(".")
        if own not in targets:
            raise RuntimeError(f"{layer}: not in target_modules, so SGLang ignores it")
        if len(a) != rank:
            raise RuntimeError(f"{layer}: A has {len(a)} rows, but SGLang reads r={rank} of the stack")
        group = next((group for group in STACKED if own in group), ())
        for other in (f"{parent}.{name}" for name in group):
            if other not in pairs and f"{other}.weight" in stored:
                raise RuntimeError(f"{layer}: SGLang stacks it with {other}, which has no A and B")
        numbered = f"{parent}.{PARTS.get(own, own)}"
        if ONE_EXPERT.fullmatch(layer) and f"{numbered}.weight" in stored:
            layer = numbered
        yield layer, scale * (a.mT @ b.mT if settings["fan_in_fan_out"] else b @ a)


def read_llama_cpp(file: Path, stored: dict[str, Tensor], config: Any) -> Iterator[Update]:
    """Read as llama.cpp: scale alpha / rows of A; rows of q and k return from pairs to halves if it rotates pairs."""
    from gguf import GGUFReader, get_tensor_name_map
    from gguf.constants import MODEL_ARCH_NAMES

    reader = GGUFReader(file)
    fields = {name: reader.fields[name].contents() for name in reader.fields}
    if (fields["general.type"], fields["adapter.type"]) != ("adapter", "lora"):
        raise RuntimeError(f"{file}: is not marked as a LoRA adapter")
    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == fields["general.architecture"])
    names = get_tensor_name_map(kind, config.num_hidden_layers)
    layers = {names.get_name(name, try_suffixes=(".weight",)): name.removesuffix(".weight") for name in stored}
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()).float() for tensor in reader.tensors}
    for name, a in tensors.items():
        weight, is_a, _ = name.partition(".lora_a")
        if not is_a:
            continue
        update = fields["adapter.lora.alpha"] / len(a) * (tensors[f"{weight}.lora_b"] @ a)
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(weight.split(".")[-2])
        if heads and fields["general.architecture"] == "llama":
            update = update.view(heads, -1, 2, update.shape[1]).transpose(1, 2).reshape(update.shape)
        yield layers[weight], update


def add_updates(stored: dict[str, Tensor], updates: Iterator[Update], model_type: str) -> int:
    """Add updates to the base checkpoint's tensors by name; return their number. Raises RuntimeError if one is unknown.

    Readers have already translated the server's names to the checkpoint's.
    """
    count = 0
    for layer, update in updates:
        count += 1
        if f"{layer}.weight" in stored:
            stored[f"{layer}.weight"] = stored[f"{layer}.weight"] + update
        else:
            _add_to_fused(stored, layer, update, model_type)
    return count


def _add_to_fused(stored: dict[str, Tensor], layer: str, update: Tensor, model_type: str) -> None:
    """Add the update of one part of one expert to a tensor of all experts."""
    experts, _, number = (layer.rpartition(".")[0]).rpartition(".")
    part = layer.rpartition(".")[2]
    wanted = () if part not in PARTS else ("down_proj",) if part == "down_proj" else ("gate_up_proj", part)
    names = [f"{experts}.{name}{end}" for name in wanted for end in ("", ".weight")]
    name = next((name for name in names if name in stored), None)
    if name is None or not number.isdecimal():
        raise RuntimeError(f"{layer}: the base has no such layer")
    whole = stored[name].clone()
    weight = whole[int(number)]
    weight = weight.mT if model_type in TRANSPOSED_EXPERTS else weight
    if "gate_up" in name:
        halves = (weight[0::2], weight[1::2]) if model_type in INTERLEAVED_EXPERTS else weight.chunk(2)
        weight = halves[0 if part == "gate_proj" else 1]
    weight += update
    stored[name] = whole


def _pairs(folder: Path) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield layer, A and B of each pair in PEFT's file; raises RuntimeError for any other tensor."""
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, a in tensors.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", name)
        if match is None:
            raise RuntimeError(f"{name}: neither A nor B of a layer")
        if match[2] == "A":
            yield match[1], a.float(), tensors[name.replace(".lora_A.", ".lora_B.")].float()
