"""The output head where it is one frozen linear layer, which can compute something else for one forward pass."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer.parallel.engine.partitioned import is_partitioned


@torch.no_grad()
def observed_factor(module: nn.Module, head: nn.Module, tokens: torch.Tensor) -> float | None:
    """c if the model's logits are c times what the head gives (1 for most, 1 / scaling for Granite), else None."""
    seen: list[float] = []
    training = module.training
    module.eval()  # no dropout, whose draws would be missing in the first step
    for probe in (1.0, 2.0, -64.0):
        with head_replaced(head, lambda hidden, value=probe: hidden.new_full((1, 1, 1), value)):
            logits = module(input_ids=tokens, use_cache=False).logits
        seen.append(float(logits) / probe if logits.shape == (1, 1, 1) else math.nan)
    module.train(training)
    return seen[0] if seen[0] > 0 and seen[0] == seen[1] == seen[2] else None


def why_not_plain(head: Any) -> str:
    """What keeps head and loss apart; empty for a frozen, whole linear layer."""
    if type(head) is not nn.Linear:
        return "the head is adapted or no linear layer" if head is not None else "the model computes every logit"
    if head.bias is not None:
        return "the head has a bias"
    if head.weight.requires_grad:
        return "the head is trained"
    if is_partitioned(head.weight):
        return "DeepSpeed's stage 3 partitions the head"
    return ""


@contextmanager
def head_replaced(head: nn.Module | None, forward: Any) -> Iterator[None]:
    """The head computes something else for one forward pass; hooks on it, which may fetch its weight, still run."""
    if head is None:
        yield
        return
    head.forward = forward
    try:
        yield
    finally:
        del head.forward
