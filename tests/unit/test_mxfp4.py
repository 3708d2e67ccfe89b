"""MXFP4: decoded as transformers decodes it, kept packed, written again to the bit; and checkpoints that mix it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ops.reference import FP4_VALUES
from tests.mixtures import EXPERTS, SMALL, make_mixture, store_in_mxfp4
from trainer.config import ModelSection, QuantizationSection, UserError
from trainer.model import mxfp4
from trainer.model.base import check_weights, load_base_model, load_model_config
from trainer.model.model_kind import check_kind
from trainer.model.packed_experts import PackedExperts
from trainer.model.published_shapes import load_shapes

CPU = torch.device("cpu")
IDS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_mixture(tmp_path_factory.mktemp("gpt-oss"), "gpt_oss", intermediate_size=96)
    return store_in_mxfp4(made)


def load(folder: Path, **how: Any) -> Any:
    settings: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "attention": "eager"}
    return load_base_model(str(folder), ModelSection(), **(settings | how))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_code_and_scale_is_what_transformers_reads(dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes = torch.arange(256, dtype=torch.uint8).repeat(16).view(1, 1, 256, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 1, 256)
    expected = convert_moe_packed_tensors(codes.clone(), scales.clone(), dtype=dtype)
    found = mxfp4.dequantize(codes, scales, dtype).view(1, 1, -1).transpose(1, 2)
    assert torch.equal(found, expected)
    assert torch.equal(torch.signbit(found), torch.signbit(expected))


def test_what_was_mxfp4_is_written_to_the_bit_and_other_values_to_the_nearest() -> None:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 4, 16), dtype=torch.uint8)
    blocks[..., 0] |= 7  # a largest value: without it a block has a smaller exponent, and the same values
    scales = torch.randint(100, 130, (3, 8, 4), dtype=torch.uint8)
    values = mxfp4.dequantize(blocks, scales, torch.float32).view(3, 8, 128)
    again_blocks, again_scales = mxfp4.quantize(values)
    assert torch.equal(again_scales, scales)
    assert torch.equal(again_blocks, blocks)
    drawn = torch.randn(5, 7, 64)
    rounded = mxfp4.dequantize(*mxfp4.quantize(drawn), torch.float32).view(drawn.shape)
    scale = torch.ldexp(torch.ones(1), mxfp4.quantize(drawn)[1].int() - 127).repeat_interleave(32, -1)
    steps = torch.tensor(sorted({sign * each for each in FP4_VALUES for sign in (1, -1)}))
    nearest = ((drawn / scale)[..., None] - steps).abs().min(-1).values
    torch.testing.assert_close(((drawn - rounded) / scale).abs(), nearest)
    assert torch.equal(mxfp4.dequantize(*mxfp4.quantize(torch.zeros(32)), torch.float32), torch.zeros(1, 32))


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_experts_stay_packed_and_compute_as_unpacked_ones(folder: Path, adapter: str) -> None:
    quantization = QuantizationSection() if adapter == "qlora" else None
    kept, unpacked = load(folder, quantization=quantization), load(folder, unpack=True)
    packed = {name: each for name, each in kept.named_parameters() if isinstance(each, PackedExperts)}
    assert len(packed) == 4
    for name, each in packed.items():
        assert torch.equal(each.dequantize(), unpacked.get_parameter(name))
        values = each.packing.experts * each.packing.rows * each.packing.cols
        assert each.nbytes < values * 4.25 / 8 + 512
    if adapter == "lora":
        assert torch.equal(kept(input_ids=IDS).logits, unpacked(input_ids=IDS).logits)


def test_unpacked_weights_are_those_of_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    expected = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    ).state_dict()
    found = load(folder, dtype=torch.bfloat16, unpack=True).state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_random_weights_may_be_drawn_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    quantised = {"quantization_config": {"quant_method": "mxfp4"}}
    monkeypatch.setitem(
        load_shapes(), "oss", {"model_type": "gpt_oss", **SMALL, **EXPERTS, "head_dim": 16, **quantised}
    )
    how: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "attention": "eager"}
    model = load_base_model("random:oss", ModelSection(), **how)
    packed = [each for each in model.parameters() if isinstance(each, PackedExperts)]
    assert len(packed) == 4
    for each in packed:
        assert 0.015 < float(each.dequantize().std()) < 0.03
    again = load_base_model("random:oss", ModelSection(), unpack=True, **how)
    assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_all_weights_cannot_be_trained_in_it(folder: Path) -> None:
    config = load_model_config(str(folder), ModelSection())
    check_kind(str(folder), config)
    with pytest.raises(UserError, match=r"adapter=none: the experts of .* are stored in MXFP4 .* use adapter: lora"):
        check_kind(str(folder), config, all_trained=True)


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        change(stored)
        save_file(stored, folder / "model.safetensors", {"format": "pt"})

    return changed


def not_announced(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))


def one_layer_in_16_bits(stored: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.experts.down_proj"
    del stored[f"{name}_blocks"], stored[f"{name}_scales"]
    stored[name] = torch.zeros(4, 96, 64)


def none_packed(stored: dict[str, torch.Tensor]) -> None:
    for name in [name for name in stored if name.endswith(("_blocks", "_scales"))]:
        del stored[name]


GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
QUERY = "model.layers.0.self_attn.q_proj.weight"
MIXED: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "a layer": (
        tensors(one_layer_in_16_bits),
        ("model.layers.1.mlp.experts.down_proj is not stored in MXFP4, unlike",),
    ),
    "scales lost": (tensors(lambda stored: stored.pop(f"{GATE_UP}_scales")), (f"{GATE_UP}_scales is missing",)),
    "blocks lost": (tensors(lambda stored: stored.pop(f"{GATE_UP}_blocks")), (f"{GATE_UP}_blocks is missing",)),
    "cut": (
        tensors(lambda stored: stored.update({f"{GATE_UP}_blocks": stored[f"{GATE_UP}_blocks"][:, :, :, :8].clone()})),
        ("which do not form blocks of 32",),
    ),
    "an expert less": (
        tensors(lambda stored: stored.update({n: v[:3].clone() for n, v in stored.items() if n.startswith(GATE_UP)})),
        (f"do not match config.json (first: {GATE_UP} has shape (3, 64, 192), config.json says (4, 64, 192))",),
    ),
    "not announced": (not_announced, ("is stored in MXFP4, but config.json does not declare it", "same model")),
    "announced only": (tensors(none_packed), ("config.json says mxfp4, but no tensor", "remove")),
    "8-bit floats": (
        tensors(lambda stored: stored.update({QUERY: stored[QUERY].to(torch.float8_e4m3fn)})),
        (f"{QUERY} is stored in 8 bits or less (F8_E4M3), unlike the other weights", "full-precision"),
    ),
    "bytes": (
        tensors(lambda stored: stored.update({QUERY: stored[QUERY].to(torch.uint8)})),
        (f"{QUERY} is stored in 8 bits or less (U8)",),
    ),
}


@pytest.mark.parametrize("case", MIXED)
def test_a_checkpoint_that_mixes_formats_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    folder = store_in_mxfp4(make_mixture(tmp_path / "model", "gpt_oss", intermediate_size=96))
    config = load_model_config(str(folder), ModelSection())
    check_kind(str(folder), config)
    assert check_weights(str(folder), ModelSection(), config) == []
    change, lines = MIXED[case]
    change(folder)
    with pytest.raises(UserError) as error:
        check_weights(str(folder), ModelSection(), load_model_config(str(folder), ModelSection()))
    assert str(error.value).startswith(f"base_model={folder}: ")
    for line in lines:
        assert line in str(error.value)
    assert "\n" not in str(error.value)
