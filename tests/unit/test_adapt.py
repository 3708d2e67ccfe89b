"""Adapters onto real layers: what is matched, what is said, and that every tensor must learn."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import make_model
from trainer.config import LoraSection, ModelSection, QuantizationSection, UserError
from trainer.model.adapter import GradientCheck, apply_adapter, count_parameters, summarize_adapted_layers
from trainer.model.base import load_base_model, load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("adapt"))


def base(folder: Path, quantization: QuantizationSection | None = None) -> Any:
    return load_base_model(
        str(folder),
        ModelSection(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention="sdpa",
        quantization=quantization,
    )


@pytest.mark.parametrize("quantized", [False, True])
def test_the_table_and_the_counts(folder: Path, quantized: bool) -> None:
    """r=4 on all linear layers of two layers: 4 (in + out) each; 4-bit weights count as what they stand for."""
    model = base(folder, QuantizationSection() if quantized else None)
    total = sum(parameter.numel() for parameter in base(folder).parameters())
    adapted = apply_adapter(model, LoraSection(r=4, alpha=8), torch.float32)
    table = {layer.name: (layer.shape, layer.count, layer.parameters) for layer in summarize_adapted_layers(adapted)}
    assert table["q_proj"] == ("64 -> 64", 2, 2 * 4 * 128)
    assert table["gate_proj"] == ("64 -> 128", 2, 2 * 4 * 192)
    assert "lm_head" not in table
    trainable = 2 * 4 * (128 + 96 + 96 + 128 + 192 + 192 + 192)
    assert count_parameters(adapted) == (trainable, total + trainable)


def test_the_adapter_starts_from_another(folder: Path, tmp_path: Path) -> None:
    first = apply_adapter(base(folder), LoraSection(r=4), torch.float32)
    with torch.no_grad():
        for name, parameter in first.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.5)
    first.save_pretrained(tmp_path)
    second = apply_adapter(base(folder), LoraSection(r=99, adapter_path=str(tmp_path)), torch.float32)
    values = [parameter for name, parameter in second.named_parameters() if "lora_B" in name]
    assert len(values) == 14 and all(bool((value == 0.5).all()) and value.requires_grad for value in values)


def test_every_tensor_must_get_a_finite_gradient(folder: Path) -> None:
    model = apply_adapter(base(folder), LoraSection(r=4), torch.float32)
    ids = torch.arange(3, 20)[None]
    check = GradientCheck(model)
    model(input_ids=ids).logits.sum().backward()
    check.finish()

    unreached = GradientCheck(model)
    with pytest.raises(RuntimeError, match="28 of 28 trained tensors got no gradient"):
        unreached.finish()

    broken = GradientCheck(model)
    (model(input_ids=ids).logits.sum() * float("inf")).backward()
    with pytest.raises(FloatingPointError, match="non-finite"):
        broken.finish()


class Experts(torch.nn.Module):
    """Two layers of experts that are modules of their own, and a shared one."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.Linear
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {"experts": torch.nn.ModuleList([layer(4, 4), layer(4, 4)]), "shared_experts": layer(4, 4)}
            )
            for _ in range(2)
        )

    def forward(self, chosen: list[int | None], *, shared: bool = True) -> torch.Tensor:
        x = torch.ones(1, 4)
        layer: Any
        for layer, expert in zip(self.layers, chosen, strict=True):
            x = x if expert is None else layer["experts"][expert](x)
            x = layer["shared_experts"](x) if shared else x
        return x.sum()


def test_only_an_experts_own_tensors_may_lack_a_gradient() -> None:
    model = Experts()
    check = GradientCheck(model)
    model([0, 1]).backward()
    check.finish()
    check = GradientCheck(model)
    model([0, 1], shared=False).backward()
    with pytest.raises(RuntimeError, match=r"4 of 12 trained tensors got no gradient \(first: layers.0.shared_experts"):
        check.finish()
    check = GradientCheck(model)
    model([0, None]).backward()
    with pytest.raises(RuntimeError, match=r"4 of 12 trained tensors got no gradient \(first: layers.1.experts.0"):
        check.finish()


def test_a_missing_pad_token_is_found_or_named(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(folder), ModelSection())
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path), ModelSection()).pad_token == "<|endoftext|>"
    assert load_tokenizer(str(tmp_path), ModelSection(pad_token="<|im_start|>")).pad_token == "<|im_start|>"
    with pytest.raises(UserError, match=r"model.pad_token=\[NO\]: not in the vocabulary"):
        load_tokenizer(str(tmp_path), ModelSection(pad_token="[NO]"))


def test_a_saved_llama_tokenizer_puts_spaces_where_it_did(tmp_path: Path) -> None:
    """transformers reads `legacy` and does not save it: without it there is no space after a special token."""
    from transformers import AutoTokenizer, LlamaTokenizer

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "\u2581": 4, "\u2581a": 5}
    LlamaTokenizer(vocab=vocabulary, merges=[("\u2581", "a")]).save_pretrained(tmp_path / "base")
    settings = json.loads((tmp_path / "base" / "tokenizer_config.json").read_text()) | {"legacy": True}
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps(settings))
    for source, output in (("base", "adapter"), ("adapter", "merged")):
        load_tokenizer(str(tmp_path / source), ModelSection()).save_pretrained(tmp_path / output)
    assert AutoTokenizer.from_pretrained(tmp_path / "base")("a</s>a").input_ids[-3:] == [5, 2, 5]
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")("a</s>a").input_ids[-3:] == [5, 2, 5]


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("block_size", [32, 64, 128, 256])
@pytest.mark.parametrize("double_quant", [True, False])
def test_4bit_layers_compute_what_their_bits_say(
    folder: Path, quant_type: Any, block_size: Any, double_quant: bool
) -> None:
    """Forward and backward against plain layers with weights read from code book and scales; the head stays whole.

    Rows of 64 and 128 weights: some blocks are longer than a row.
    """
    import bitsandbytes as bnb
    from bitsandbytes.functional import dequantize_blockwise

    section = QuantizationSection(quant_type=quant_type, block_size=block_size, double_quant=double_quant)
    quantized, plain = base(folder, section), base(folder)
    layers = {name: module for name, module in quantized.named_modules() if isinstance(module, bnb.nn.Linear4bit)}
    assert len(layers) == 14 and "lm_head" not in layers
    for name, module in layers.items():
        state = module.quant_state
        scales = dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
        pairs = [state.code[half.long()] for half in (module.weight.data >> 4, module.weight.data & 15)]
        values = torch.cat(pairs, dim=1).view(-1, block_size) * scales[:, None]
        truth = plain.get_submodule(name).weight
        assert 0 < (values.view(truth.shape) - truth).norm() < 0.2 * truth.norm()
        truth.data = values.view(truth.shape)
    ids = torch.arange(3, 40)[None]
    results = []
    for model in (quantized, plain):
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        logits = model(inputs_embeds=embedded).logits
        logits.square().mean().backward()
        results.append((logits.detach(), embedded.grad))
    # One multiplies the very weights that the other dequantises, by the same products.
    torch.testing.assert_close(results[0], results[1], atol=0, rtol=0)


def test_a_model_without_safetensors_is_refused(folder: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no \.safetensors file"):
        base(tmp_path / "m", QuantizationSection())
