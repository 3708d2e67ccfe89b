"""The load of experts as metrics: shares and entropy."""

import math
from typing import Any

import pytest
import torch

from tests.unit.test_experts import LORA, base_of, trained
from trainer.config import LoraSection
from trainer.model.adapter import apply_adapter
from trainer.monitor.hooks import ExpertLoad
from trainer.parallel.engine.flat_adapter import flatten_adapter


def routed(monkeypatch: pytest.MonkeyPatch, chosen: tuple[int, ...]) -> Any:
    """Return an adapted model of one layer of four experts; its router sends every token to those named."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    def route(self: Any, hidden: torch.Tensor) -> Any:
        tokens = hidden.reshape(-1, hidden.shape[-1]).shape[0]
        index = torch.tensor(chosen).repeat(tokens, 1)
        return hidden.new_zeros(tokens, 4), hidden.new_full(index.shape, 0.5), index

    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", route)
    model = apply_adapter(base_of("qwen3_moe"), LoraSection(**LORA), torch.float32)
    flat = flatten_adapter(model, separate_up=False)
    assert flat is not None
    return model.train(), flat


def test_shares_and_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    model, flat = routed(monkeypatch, (1, 3))
    load = ExpertLoad.for_model(model, compiled=False)
    assert load is not None
    assert load.compute_metrics() == {}, "before any step"
    trained(model, flat.buffers, steps=2)
    expected = {
        "experts/busiest_share": 0.5,
        "experts/idlest_share": 0.0,
        "experts/entropy": pytest.approx(math.log(2) / math.log(4)),
    }
    assert load.compute_metrics() == expected
    with torch.no_grad():
        model.eval()(input_ids=torch.arange(3, 9)[None], use_cache=False)
    assert load.compute_metrics()["experts/busiest_share"] == 0.0, "counted again, and evaluation does not count"


def test_a_model_without_experts_has_no_load() -> None:
    from tests.unit.test_targets import model_of

    assert ExpertLoad.for_model(model_of("llama", num_hidden_layers=1), compiled=False) is None
