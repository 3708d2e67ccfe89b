"""Plain PEFT loads the adapter of every family of models whole: each tensor is taken, none is missing."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file

from tests.any_input import or_refused, tries
from tests.families import FAMILIES, tiny_family
from tests.saved_adapters import save_adapter
from trainer.config import LoraSection, UserError
from trainer.model.adapter import apply_adapter, load_initial_adapter
from trainer.model.saved_adapter import load_adapter

SOME = ("afmoe", "deepseek_v3", "deepseek_v32", "gpt_oss", "jamba", "laguna", "llama", "qwen3_moe", "zaya")
"""Families with plain, renamed, fused and excluded layers; the others are slow tests."""


def contents(tensors: Iterable[torch.Tensor]) -> set[bytes]:
    return {tensor.detach().numpy().tobytes() for tensor in tensors}


def adapt(kind: str, **lora: Any) -> Any:
    return apply_adapter(tiny_family(kind), LoraSection(**lora), torch.float32).eval()


def check_round_trip(adapted: Any, kind: str, folder: Path) -> None:
    """Save the adapter of a tiny model and load it with plain PEFT, then as the product's commands do."""
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05)
    save_adapter(adapted, folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing")
        loaded = PeftModel.from_pretrained(tiny_family(kind), folder).eval()
    # Names and order may differ; random values do not repeat.
    in_model = contents(value for name, value in loaded.named_parameters() if "lora_" in name)
    assert in_model == contents(load_file(folder / "adapter_model.safetensors").values())
    again = load_adapter(tiny_family(kind), str(folder)).eval()
    tokens = torch.arange(3, 19)[None]
    with torch.no_grad():
        expected, *found = (model(input_ids=tokens, use_cache=False).logits for model in (adapted, loaded, again))
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "kind", [each if each in SOME else pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES]
)
def test_plain_peft_loads_every_tensor(kind: str, tmp_path: Path) -> None:
    check_round_trip(adapt(kind, r=2), kind, tmp_path)


def test_pissa_with_patterns_is_saved_for_the_unchanged_base(tmp_path: Path) -> None:
    adapted = adapt("llama", r=2, init="pissa", rank_pattern={"v_proj": 3}, alpha_pattern={"v_proj": 5.0})
    save_adapter(adapted, tmp_path / "initial", require_nonzero_b=False)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    save_adapter(adapted, tmp_path / "saved", initial=tmp_path / "initial")
    loaded = PeftModel.from_pretrained(tiny_family("llama"), tmp_path / "saved").eval()
    tokens = torch.arange(3, 19)[None]
    with torch.no_grad():
        expected, found = (model(input_ids=tokens, use_cache=False).logits for model in (adapted, loaded))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


LAYERS = ["q_proj", "v_proj", "o_proj", "down_proj", "gate_proj", "mlp", "experts", "layers.0", r".*\.(k|up)_proj"]
patterns = st.dictionaries(st.sampled_from(LAYERS), st.integers(1, 6), max_size=2)
adapters = st.fixed_dictionaries(
    {"r": st.integers(1, 8)},
    optional={
        "alpha": st.sampled_from([1.0, 7.5]),
        "rslora": st.booleans(),
        "target_modules": st.lists(st.sampled_from(LAYERS), min_size=1, max_size=3, unique=True),
        "exclude_modules": st.lists(st.sampled_from(LAYERS), max_size=2, unique=True),
        "rank_pattern": patterns,
        "alpha_pattern": patterns,
        "experts": st.booleans(),
        "expert_rank": st.sampled_from([1, "r", "r/top_k"]),
        "dora": st.booleans(),
    },
)


def check_settings(kind: str, lora: dict[str, Any], folder: Path) -> None:
    """Settings that do not fit the model may be refused before training, but never at a save or at loading."""
    if (adapted := or_refused(lambda: adapt(kind, **lora))) is not None:
        check_round_trip(adapted, kind, folder)


@example("llama", {"r": 1, "alpha_pattern": {"v_proj": 1, ".*_proj": 9}, "rank_pattern": {"v_proj": 1, ".*_proj": 2}})
@example("qwen3_next", {"r": 1, "alpha_pattern": {"down_proj": 1}, "rank_pattern": {"down_proj": 2}})
@given(st.sampled_from(SOME), adapters)
@tries(25)
def test_an_adapter_of_any_settings_comes_back(
    tmp_path_factory: pytest.TempPathFactory, kind: str, lora: dict[str, Any]
) -> None:
    check_settings(kind, lora, tmp_path_factory.mktemp("adapter"))


@pytest.mark.slow
@given(st.sampled_from(FAMILIES), adapters)
@tries(150)
def test_an_adapter_of_any_settings_comes_back_to_every_family(
    tmp_path_factory: pytest.TempPathFactory, kind: str, lora: dict[str, Any]
) -> None:
    check_settings(kind, lora, tmp_path_factory.mktemp("adapter"))


def test_layers_that_peft_takes_for_experts_may_have_dropout(tmp_path: Path) -> None:
    """They are saved by weight, and PEFT refuses dropout of weights."""
    adapted = adapt("afmoe", r=2, dropout=0.25, experts=False)
    save_adapter(adapted, tmp_path, require_nonzero_b=False)
    PeftModel.from_pretrained(tiny_family("afmoe"), tmp_path)
    again = load_initial_adapter(tiny_family("afmoe"), LoraSection(dropout=0.25, adapter_path=str(tmp_path)))
    for model in (adapted, again):
        rates = {name: part.p for name, part in model.named_modules() if name.endswith("lora_dropout.default")}
        assert set(rates.values()) == {0.25} and any("gate_proj" in name for name in rates)


def test_dora_of_layers_that_peft_takes_for_experts_is_refused_before_training() -> None:
    with pytest.raises(UserError, match=r"lora\.dora=true: PEFT loads .*gate_proj\.weight as a parameter"):
        adapt("afmoe", r=2, dora=True, experts=False)
