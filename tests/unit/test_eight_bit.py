"""A base in 8 bits: what is loaded, what PEFT and the operators make of it, what is refused, its estimated size."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ops.eight_bit import STORAGE
from ops.reference import quantize_rows
from tests.tiny import make_model
from tests.unit.test_memory_model import placement
from trainer.config import LoraSection, ModelSection, QuantizationSection, UserError
from trainer.memory.model_widths import read_shapes
from trainer.memory.stored_weights import base_weight_bytes
from trainer.model.adapter import apply_adapter, count_parameters
from trainer.model.base import load_base_model, load_model_config
from trainer.model.eight_bit import FrozenLinear8bit, check_fp8_support
from trainer.model.targets import describe_unadapted_layers
from trainer.patches.fused_lora import fuse_layers

IDS = torch.arange(3, 43).view(2, 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("eight"), attention_bias=True)


def loaded(folder: Path, kind: str | None, dtype: torch.dtype = torch.float32) -> Any:
    quantization = QuantizationSection(quant_type=kind) if kind else None
    device, section = torch.device("cpu"), ModelSection()
    return load_base_model(
        str(folder), section, dtype=dtype, device=device, attention="sdpa", quantization=quantization
    )


@pytest.mark.parametrize("kind", [*STORAGE])
def test_every_linear_layer_but_the_head_holds_the_files_rows_in_8_bits(folder: Path, kind: str) -> None:
    model, files = loaded(folder, kind), load_file(folder / "model.safetensors")
    layers = {name: each for name, each in model.named_modules() if isinstance(each, FrozenLinear8bit)}
    assert len(layers) == 14 and type(model.lm_head) is torch.nn.Linear
    for name, layer in layers.items():
        values, scale = quantize_rows(files[f"{name}.weight"].float(), STORAGE[kind])
        assert torch.equal(layer.weight, values) and torch.equal(layer.row_scale, scale)
        assert not layer.weight.requires_grad
    model.bfloat16()  # as the 16-bit engine does it
    assert all(
        layer.weight.dtype == STORAGE[kind] and layer.row_scale.dtype == torch.float32 for layer in layers.values()
    )


@pytest.mark.parametrize(("kind", "allowed"), [("fp8", 0.06), ("int8", 0.02)])
def test_the_models_output_is_near_that_of_the_16_bit_base(folder: Path, kind: str, allowed: float) -> None:
    with torch.no_grad():
        wanted, found = (loaded(folder, each)(input_ids=IDS).logits for each in (None, kind))
    assert 0 < float((found - wanted).norm() / wanted.norm()) < allowed


@pytest.mark.parametrize("kind", [*STORAGE])
def test_the_operators_take_it_and_pefts_own_forward_as_well(folder: Path, kind: str) -> None:
    """The same logits to the order of sums; PEFT's dY is quantised layer by layer, ours once for siblings."""
    results = []
    for fused in (False, True):
        model = loaded(folder, kind)
        torch.manual_seed(1)
        model = apply_adapter(model, LoraSection(r=4, alpha=8), torch.float32)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, 0, 0.1)
        if fused:
            report = fuse_layers(model, "reference", forward=partial(model, input_ids=IDS, use_cache=False))
            assert (report.fused_count, report.total) == (14, 14)
        logits = model(input_ids=IDS, use_cache=False).logits
        logits.square().mean().backward()
        grads = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
        results.append((logits.detach(), torch.cat([grad.flatten() for grad in grads])))
    # Inputs are rounded to 8 bits: one that lies between two steps may be rounded otherwise, by 1 part in 127.
    torch.testing.assert_close(results[0][0], results[1][0], atol=2e-3, rtol=2e-3)
    (_, theirs), (_, ours) = results
    assert float(torch.nn.functional.cosine_similarity(theirs, ours, dim=0)) > 0.999


def test_parameters_are_counted_and_no_layer_is_called_odd(folder: Path) -> None:
    plain, packed = loaded(folder, None), loaded(folder, "fp8")
    assert count_parameters(plain)[1] == count_parameters(packed)[1]
    section = LoraSection(r=4)
    adapted = [apply_adapter(model, section, torch.float32) for model in (plain, packed)]
    assert describe_unadapted_layers(adapted[0], section) == describe_unadapted_layers(adapted[1], section)


def test_fp8_on_a_card_without_it_names_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(
        UserError, match=r"NVIDIA A100 has compute capability 8\.0, .* use quantization\.quant_type: int8"
    ):
        check_fp8_support("fp8", torch.device("cuda"))
    check_fp8_support("int8", torch.device("cuda"))
    check_fp8_support("fp8", torch.device("cpu"))


def test_the_estimate_counts_the_bytes_that_lie_there(folder: Path) -> None:
    model = loaded(folder, "int8", torch.bfloat16)
    shapes = read_shapes(load_model_config(str(folder), ModelSection()), ModelSection(), LoraSection(r=4))
    kept = placement(packed=True, quant_type="int8")
    real = sum(each.nbytes for each in model.parameters())
    real += sum(each.row_scale.nbytes for each in model.modules() if isinstance(each, FrozenLinear8bit))
    assert (
        real <= base_weight_bytes(shapes, kept) <= real + 512 * 2 * len(shapes.weights)
    )  # what an allocator rounds up
