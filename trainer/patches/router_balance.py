"""The load-balancing loss of transformers without padding tokens, also for packed rows."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer.contract.known_versions import replaced, require
from trainer.contract.replacements import replaces
from trainer.model.expert_targets import BALANCE


@replaces(
    "`load_balancing_loss_func` of modeling files",
    library="transformers",
    read_in="5.23.0",
    why="it counts the padding of packed rows, for which the model gets no mask",
    active="training.router_aux_loss",
    test="tests/unit/test_router_loss.py: test_padding_of_packed_rows_is_not_balanced",
)
@contextmanager
def mask_balancing_loss(mask: torch.Tensor | None, base: nn.Module) -> Iterator[None]:
    """Count only the tokens where `mask` is 1 in the load-balancing loss of the model `base`."""
    owner = sys.modules[type(base).__module__]
    balance = require(owner, BALANCE, "transformers")

    def masked(*args: Any, **kwargs: Any) -> Any:
        return balance(**inspect.signature(balance).bind(*args, **kwargs).arguments | {"attention_mask": mask})

    with replaced(owner, BALANCE, masked, "transformers"):
        yield
