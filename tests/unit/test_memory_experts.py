"""The estimate of mixtures with packed experts: their stored form, the buffer, what a micro-step keeps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.eight_bits import store_in_fp8
from tests.mixtures import make_mixture, store_in_mxfp4
from tests.unit.test_memory_model import LENGTH, ROWS, bytes_saved, placement, rest, seen, work
from trainer.config import LoraSection, ModelSection, QuantizationSection
from trainer.memory.model_widths import read_shapes
from trainer.memory.stored_weights import ModelShapes, base_weight_bytes, dequantized_expert_bytes, gathered_bytes
from trainer.model.adapter import apply_adapter
from trainer.model.base import load_base_model, load_model_config
from trainer.model.packed_experts import list_packed_tensors
from trainer.parallel.engine.layer_gather.unit import find_slots

ATTENTION = LoraSection(r=8, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
# (family, adapter, what is changed)
KINDS: dict[str, tuple[str, QuantizationSection | None]] = {
    "nf4": ("qwen3_moe", QuantizationSection()),
    "nf4-once": ("mixtral", QuantizationSection(double_quant=False, block_size=128)),
    "transposed": ("gpt_oss", QuantizationSection()),
    "mxfp4": ("mxfp4", None),
    "mxfp4-nf4": ("mxfp4", QuantizationSection()),
    "fp8": ("mixtral", QuantizationSection(quant_type="fp8")),
    "int8-transposed": ("gpt_oss", QuantizationSection(quant_type="int8")),
    "stored-fp8": ("stored-fp8", None),
}


def made(folder: Path, family: str) -> Path:
    wide = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 384, "num_attention_heads": 8}
    made_of = {"mxfp4": "gpt_oss", "stored-fp8": "qwen3_moe"}.get(family, family)
    make_mixture(folder, made_of, num_experts=8, num_local_experts=8, **wide)
    if family == "stored-fp8":
        return store_in_fp8(folder, "blocks", block=128)
    return store_in_mxfp4(folder) if family == "mxfp4" else folder


def shapes_of(folder: Path) -> ModelShapes:
    return read_shapes(load_model_config(str(folder), ModelSection()), ModelSection(), ATTENTION)


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_is_as_large_as_it_lies_there(kind: str, tmp_path: Path) -> None:
    family, quantization = KINDS[kind]
    folder = made(tmp_path, family)
    how: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "attention": "eager"}
    model = load_base_model(str(folder), ModelSection(), quantization=quantization, **how)
    held = sum(slot.nbytes for parameter in model.parameters() for slot, _ in find_slots(parameter))
    section = quantization or QuantizationSection()
    kept = placement(packed=quantization is not None, **section.model_dump())
    assert base_weight_bytes(shapes_of(folder), kept) == pytest.approx(held, rel=0.02)
    banks = [list_packed_tensors(module) for module in model.modules()]
    buffers = max(sum(2 * torch.Size(each.packing.shape).numel() for each in bank.values()) for bank in banks)
    assert dequantized_expert_bytes(shapes_of(folder), kept) == pytest.approx(buffers, rel=0.01)
    layers = placement(stage=3, by_layer=True, world_size=2, packed=kept.packed, **section.model_dump())
    layer = sum(slot.nbytes for each in model.model.layers[0].parameters() for slot, _ in find_slots(each))
    assert gathered_bytes(shapes_of(folder), layers)[0] == pytest.approx(2 * layer, rel=0.02)


@pytest.mark.parametrize("kind", ["nf4", "mxfp4"])
def test_packed_experts_keep_their_inputs(kind: str, tmp_path: Path) -> None:
    family, quantization = KINDS[kind]
    folder = made(tmp_path, family)
    how: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "attention": "eager"}
    model: nn.Module = load_base_model(str(folder), ModelSection(), quantization=quantization, **how)
    saved = bytes_saved(apply_adapter(model, ATTENTION, torch.float32).train())
    settings = work(packed=quantization is not None, packed_experts=True, attention="eager", fused=False)
    predicted = seen(shapes_of(folder), settings).kept + rest(256, 4)
    assert predicted == pytest.approx(saved, rel=0.1)
    rows = ROWS * LENGTH * 2
    assert saved < predicted + 2 * rows * 384 * 4, "gate and up of all rows were not kept"
