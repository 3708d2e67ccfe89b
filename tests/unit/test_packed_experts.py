"""Experts are read one at a time from every kind of checkpoint, into 16 bits or packed, and computed as they stand."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import load_file

from tests.mixtures import MIXTURES, make_mixture
from trainer.config import LoraSection, ModelSection, QuantizationSection
from trainer.model.adapter import apply_adapter, count_parameters
from trainer.model.base import load_base_model, load_model_config
from trainer.model.packed_experts import PackedExperts, build_experts_layout
from trainer.model.streamed_weights import load_model_by_module
from trainer.parallel.engine.linear_layers import find_expert_weights
from trainer.patches.mamba import describe_unadapted_weights

CPU = torch.device("cpu")
IDS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mixtures")
    return {name: make_mixture(folder / name, name) for name in MIXTURES}


def streamed(folder: Path, quantization: QuantizationSection | None = None, **how: Any) -> Any:
    config = load_model_config(str(folder), ModelSection())
    config.use_cache = False
    settings: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "attention": "eager", "deepspeed_config": None}
    return load_model_by_module(str(folder), ModelSection(), config, quantization=quantization, **(settings | how))


def whole(folder: Path) -> Any:
    return load_base_model(str(folder), ModelSection(), dtype=torch.float32, device=CPU, attention="eager")


def packed_of(model: Any) -> dict[str, PackedExperts]:
    return {name: each for name, each in model.named_parameters() if isinstance(each, PackedExperts)}


def with_experts_of(model: Any, reference: Any) -> Any:
    """The 4-bit model with its experts in 32 bits: those that bitsandbytes makes of each of the reference's."""
    twin = reference
    for name, packed in packed_of(model).items():
        experts = twin.get_parameter(name)
        for index in range(packed.packing.experts):
            matrix = experts.data[index].t() if packed.packing.transposed else experts.data[index]
            row = matrix.reshape(1, -1)  # in one row, where bitsandbytes has no fault on a CPU
            made = dequantize_4bit(*quantize_4bit(row, blocksize=64, compress_statistics=True, quant_type="nf4"))
            matrix.copy_(made.view(matrix.shape))
    for name, module in model.named_modules():
        if type(module).__name__ == "FrozenLinear4bit":
            parent, _, last = name.rpartition(".")
            setattr(twin.get_submodule(parent), last, copy.deepcopy(module))
    return twin


@pytest.mark.parametrize("name", MIXTURES)
def test_streamed_weights_are_those_of_transformers(folders: dict[str, Path], name: str) -> None:
    expected, found = whole(folders[name]).state_dict(), streamed(folders[name]).state_dict()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("name", MIXTURES)
def test_packed_experts_compute_what_bitsandbytes_makes_of_each(folders: dict[str, Path], name: str) -> None:
    """Logits and the gradient of the embedded tokens, against the same experts dequantised by bitsandbytes."""
    model = streamed(folders[name], QuantizationSection())
    packed = packed_of(model)
    banks = [bank for module in whole(folders[name]).modules() for bank in find_expert_weights(module).values()]
    assert len(packed) == len(banks) > 0
    assert {each.packing.transposed for each in packed.values()} == {name in ("gpt_oss", "llama4_text")}
    twin = with_experts_of(model, whole(folders[name]))
    results = []
    for each in (model, twin):
        embedded = each.get_input_embeddings()(IDS).detach().requires_grad_()
        logits = each(inputs_embeds=embedded, use_cache=False).logits
        logits.square().mean().backward()
        results.append((logits.detach(), embedded.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


def test_parameters_are_counted_as_what_they_stand_for_and_packed_experts_are_listed(folders: dict[str, Path]) -> None:
    lora = LoraSection(target_modules=("q_proj",))
    plain = apply_adapter(whole(folders["mixtral"]), lora, torch.float32)
    packed = apply_adapter(streamed(folders["mixtral"], QuantizationSection()), lora, torch.float32)
    assert count_parameters(packed) == count_parameters(plain)
    [line] = describe_unadapted_weights(packed)
    assert line.startswith("without adapter (not linear layers): ")
    assert all(part in line for part in ("gate (2 of 4 x 64)", "experts.gate_up_proj (2 of 4 x 256 x 64)"))


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("shape", [(3, 48, 64), (2, 40, 24), (2, 256, 512)])
def test_an_expert_is_packed_as_bitsandbytes_packs_its_matrix(
    shape: tuple[int, int, int], block_size: int, double_quant: bool
) -> None:
    torch.manual_seed(0)
    how: dict[str, Any] = {"block": block_size, "double_quant": double_quant}
    experts = torch.randn(shape) * torch.tensor([1.0, 30.0, 0.1])[: shape[0], None, None]
    packed = PackedExperts.empty(build_experts_layout("nf4", experts.shape, torch.float32, **how), CPU)
    for index, matrix in enumerate(experts):
        packed.quantize(index, matrix)
    for index, matrix in enumerate(experts):
        row = matrix.reshape(1, -1)
        quantised, state = quantize_4bit(row, blocksize=block_size, compress_statistics=double_quant, quant_type="nf4")
        assert torch.equal(packed.sections()["codes"][index], quantised.view(-1))
        if row.numel() % block_size == 0:
            assert torch.equal(packed.dequantize_expert(index).view(1, -1), dequantize_4bit(quantised, state))
        assert float((packed.dequantize_expert(index) - matrix).norm() / matrix.norm()) < 0.13
        assert torch.equal(packed.dequantize()[index], packed.dequantize_expert(index))
    again = copy.deepcopy(packed)
    assert torch.equal(again.dequantize(), packed.dequantize())


@pytest.mark.parametrize("name", ["mixtral", "granitemoe"])
def test_loading_has_one_expert_in_full_precision_at_a_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is read from the files nothing is larger than one expert's tensor, or one that is no expert's."""
    folder = make_mixture(tmp_path, name, num_local_experts=16)
    stored = load_file(folder / "model.safetensors")
    largest = max(
        value.numel() for key, value in stored.items() if "input_linear" not in key and "output_linear" not in key
    )
    seen: list[int] = []
    from trainer.model.tensor_files import SafetensorsFiles

    read = SafetensorsFiles.read

    def watched(self: Any, name: str, index: int | None = None) -> torch.Tensor:
        value = read(self, name, index)
        seen.append(value.numel())
        return value

    monkeypatch.setattr(SafetensorsFiles, "read", watched)
    streamed(folder, QuantizationSection())
    assert max(seen) <= largest
