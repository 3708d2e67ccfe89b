"""Replace a plain linear output head for one forward pass; only its rows for new tokens may be trained."""

import math
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ops.head import TrainedRows
from trainer.contract.known_versions import patch_objects, replaces
from trainer.parallel.engine.partitioned import is_partitioned


@torch.no_grad()
def measure_head_factor(module: nn.Module, head: nn.Module, tokens: torch.Tensor) -> float | None:
    """Return the constant ratio of logits to the head's output (1 / scaling for Granite); None if it varies."""
    factors: list[float] = []
    training = module.training
    module.eval()  # dropout would advance the random state of the first step
    with suppress(IndexError):  # Chameleon sets the logits of some tokens
        for probe in (1.0, 2.0, -64.0):
            with replace_head(head, lambda hidden, value=probe: hidden.new_full((1, 1, 1), value)):
                logits = module(input_ids=tokens, use_cache=False).logits
            factors.append(float(logits) / probe if logits.shape == (1, 1, 1) else math.nan)
    module.train(training)
    return factors[0] if factors and factors[0] > 0 and len(set(factors)) == 1 else None


def describe_plain_head_problem(head: Any) -> str:
    layer = get_linear_layer(head)
    if type(layer) is not nn.Linear:
        return "the head is not a plain linear layer" if head is not None else "the model computes all logits"
    if layer.bias is not None:
        return "the head has a bias"
    if layer.weight.requires_grad:
        return "the head is trained"
    if is_partitioned(layer.weight):
        return "DeepSpeed's stage 3 partitions the head"
    return ""


def get_linear_layer(head: Any) -> Any:
    return head.original_module if _has_trained_rows(head) else head


def get_trained_rows(head: Any) -> TrainedRows | None:
    """Return the trained rows of the head (`model.added_tokens`); None if there are none or they are disabled."""
    if not _has_trained_rows(head) or head.token_adapter.disable_adapters:
        return None
    adapter = head.token_adapter
    [name] = adapter.active_adapters
    values = adapter.trainable_tokens_delta[name]
    if (indices := _INDICES.get(adapter)) is None or indices.device != values.device:
        _INDICES[adapter] = indices = torch.tensor(adapter.token_indices[name], device=values.device)
    return TrainedRows(indices, values)


def _has_trained_rows(head: Any) -> bool:
    from peft.utils.other import TrainableTokensWrapper

    return isinstance(head, TrainableTokensWrapper)


_INDICES: WeakKeyDictionary[nn.Module, torch.Tensor] = WeakKeyDictionary()
"""Cached indices on the device, because copying them in every pass would synchronize with the device."""


@replaces("the forward of the output head")
def replace_head(head: nn.Module | None, forward: Any) -> AbstractContextManager[None]:
    """Replace the head's forward within the block; hooks, which may gather the head's weight, still run."""
    return nullcontext() if head is None else patch_objects((head, "forward", forward))
