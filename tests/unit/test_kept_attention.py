"""Recomputed layers that keep attention: the same gradients, and one call of the operator per layer."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from tests.unit.test_decisions import planner
from trainer.config import LoraSection, RunConfig, TrainingSection, UserError
from trainer.config.checks import check_combinations
from trainer.memory.planner import DataSize, apply_changes
from trainer.model.adapter import apply_adapter
from trainer.patches.recompute import ATTENTION_OPERATORS, build_attention_contexts, enable_recomputation
from trainer.patches.tiled_mlp import tile_feed_forward

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
PACKED = torch.cat([torch.arange(11), torch.arange(29)])[None]


class Calls(TorchDispatchMode):
    """Counts attention operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in ATTENTION_OPERATORS
        return func(*args, **(kwargs or {}))


def one_pass(
    architecture: str, training: dict[str, Any], *, packed: bool = False, tile: int = 0, dropout: float = 0.0
) -> tuple[int, list[torch.Tensor]]:
    """Return the calls of attention operators in a forward and a backward pass, and the adapter's gradients."""
    torch.manual_seed(0)
    if architecture == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**SMALL))
    else:
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=7))
    model = apply_adapter(model, LoraSection(r=4, dropout=dropout), torch.float32).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        nn.init.normal_(parameter, std=0.1)
    if tile:
        tile_feed_forward(model, tile)
    enable_recomputation(model, TrainingSection.model_validate(training))
    ids = torch.randint(1, 64, (1, 40), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    with Calls() as calls:
        positions = {"position_ids": PACKED} if packed else {}
        model(input_ids=ids, labels=ids, use_cache=False, **positions).loss.backward()
    return calls.count, [parameter.grad for parameter in trained if parameter.grad is not None]


KEPT = {"gradient_checkpointing": "non_reentrant", "recompute_attention": False}
AGAIN = {"gradient_checkpointing": "non_reentrant", "recompute_attention": True}


@pytest.mark.parametrize("settings", [{}, {"packed": True}, {"tile": 16}, {"dropout": 0.3}])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_attention_is_computed_once_with_the_same_gradients(architecture: str, settings: dict[str, Any]) -> None:
    calls, whole = one_pass(architecture, {}, **(settings | {"tile": 0}))
    again, _ = one_pass(architecture, AGAIN, **settings)
    once, kept = one_pass(architecture, KEPT, **settings)
    assert (calls, again, once) == (3, 6, 3)
    assert len(kept) == len(whole) > 0
    for got, wanted in zip(kept, whole, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


def test_the_first_layers_alone() -> None:
    layers = {"gradient_checkpointing_layers": 2}
    whole, kept, again = (one_pass("llama", settings) for settings in ({}, KEPT | layers, AGAIN | layers))
    assert (kept[0], again[0]) == (3, 5) and all(map(torch.equal, kept[1], whole[1]))


def test_dropped_probabilities_and_other_kinds_of_recomputation_are_refused() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL, attention_dropout=0.1))
    with pytest.raises(UserError, match=r"training\.recompute_attention=false: the model has attention dropout"):
        enable_recomputation(model, TrainingSection.model_validate(KEPT))
    data = {"path": "unset.jsonl"}
    settings = {"base_model": "unset", "output_dir": "unset", "dataset": data, "training": KEPT}
    settings["training"] = KEPT | {"gradient_checkpointing": "selective"}
    problem = "recompute_attention=false: not supported with .*=selective; use non_reentrant"
    with pytest.raises(UserError, match=problem):
        check_combinations(RunConfig.model_validate(settings))


def test_kept_attention_is_estimated_where_it_is_kept() -> None:
    """Llama with 2 layers of 256: 512 bytes and 4 x 4 of logarithms per token and layer."""
    llama = replace(planner("llama", vocab_size=512), lengths=DataSize(32_768, 32_768))
    data = {"path": "unset.jsonl", "max_length": 32_768, "packing": True}
    training = {"gradient_checkpointing": "non_reentrant", "offload_activations": True}
    settings = {"base_model": "unset", "output_dir": "unset", "dataset": data, "training": training}
    config = RunConfig.model_validate(settings)
    kept = apply_changes(config, {"training.recompute_attention": False})
    assert llama.build_decisions(config).attention_again.value is True
    assert llama.build_decisions(kept).attention_again.value is False
    assert llama.estimate(kept).host - llama.estimate(config).host == 2 * (llama.lengths.longest * (512 + 16))


def test_results_of_attention_that_are_no_tensors_are_returned_as_they_are() -> None:
    """cuDNN's attention returns None for what it does not need; `load` may know tensors alone."""
    loaded: list[Any] = []

    def load(kept: Any) -> Any:
        loaded.append(kept)
        return kept

    keep, again = build_attention_contexts(lambda tensor: tensor, load)
    keep._results.append([torch.zeros(2), None, 7])  # type: ignore[attr-defined]
    found = again.__torch_dispatch__(next(iter(ATTENTION_OPERATORS)), ())  # type: ignore[attr-defined]
    assert found[1:] == (None, 7) and len(loaded) == 1
