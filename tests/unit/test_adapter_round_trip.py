"""Plain PEFT loads the adapter of every family of models whole: each tensor is taken, none is missing."""

import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from tests.families import FAMILIES, tiny_family
from tests.saved_adapters import save_adapter
from trainer.config import LoraSection
from trainer.model.adapter import apply_adapter, load_initial_adapter

SOME = ("afmoe", "deepseek_v3", "deepseek_v32", "gpt_oss", "jamba", "laguna", "llama", "qwen3_moe", "zaya")
"""Families with plain, renamed, fused and excluded layers; the others are slow tests."""


def contents(tensors: Iterable[torch.Tensor]) -> set[bytes]:
    return {tensor.detach().numpy().tobytes() for tensor in tensors}


def adapt(kind: str, settings: LoraSection, folder: Path) -> PeftModel:
    """A model with a random adapter, saved to a folder."""
    adapted: PeftModel = apply_adapter(tiny_family(kind), settings, torch.float32)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05)
    save_adapter(adapted, folder)
    return adapted


@pytest.mark.parametrize(
    "kind", [each if each in SOME else pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES]
)
def test_plain_peft_loads_every_tensor(kind: str, tmp_path: Path) -> None:
    adapted = adapt(kind, LoraSection(r=2), tmp_path).eval()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing")
        loaded = PeftModel.from_pretrained(tiny_family(kind), tmp_path).eval()
    # Names and order may differ; random values do not repeat.
    in_model = contents(value for name, value in loaded.named_parameters() if "lora_" in name)
    assert in_model == contents(load_file(tmp_path / "adapter_model.safetensors").values())
    tokens = torch.arange(3, 19)[None]
    with torch.no_grad():
        expected, found = (model(input_ids=tokens, use_cache=False).logits for model in (adapted, loaded))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_layers_that_peft_takes_for_experts_may_have_dropout(tmp_path: Path) -> None:
    """They are saved by weight, and PEFT refuses dropout of weights."""
    adapted = adapt("afmoe", LoraSection(r=2, dropout=0.25, experts=False), tmp_path)
    PeftModel.from_pretrained(tiny_family("afmoe"), tmp_path)
    again = load_initial_adapter(tiny_family("afmoe"), LoraSection(dropout=0.25, adapter_path=str(tmp_path)))
    for model in (adapted, again):
        rates = {name: part.p for name, part in model.named_modules() if name.endswith("lora_dropout.default")}
        assert set(rates.values()) == {0.25} and any("gate_proj" in name for name in rates)
