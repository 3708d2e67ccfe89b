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
from trainer.model.adapter import apply_adapter

SOME = ("afmoe", "deepseek_v3", "deepseek_v32", "gpt_oss", "jamba", "laguna", "llama", "qwen3_moe", "zaya")
"""Families with plain, renamed, fused and excluded layers; the others are slow tests."""


def contents(tensors: Iterable[torch.Tensor]) -> set[bytes]:
    return {tensor.detach().numpy().tobytes() for tensor in tensors}


@pytest.mark.parametrize(
    "kind", [each if each in SOME else pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES]
)
def test_plain_peft_loads_every_tensor(kind: str, tmp_path: Path) -> None:
    adapted = apply_adapter(tiny_family(kind), LoraSection(r=2), torch.float32).eval()
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05)
    save_adapter(adapted, tmp_path)
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
