"""The averaged weights of Schedule-Free, evaluated and saved instead of those at which gradients are computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainer.contract.known_versions import require
from trainer.parallel.engine.protocol import Engine

AVERAGES = "train_mode"
"""Key of the parameter groups of schedulefree's optimizers: whether weights are those of the gradients."""
COUNTED = ("k", "weight_sum", "lr_max")


@contextmanager
def averaged_weights(engine: Engine) -> Iterator[None]:
    """Give the model its averaged weights within the block, if the optimizer has any; a collective call.

    Afterwards the weights are the same bits as before.
    """
    optimizer: Any = engine.basic_optimizer
    groups = optimizer.param_groups
    if not groups[0].get(AVERAGES):
        yield
        return
    masters = [parameter for group in groups for parameter in group["params"]]
    kept = [master.detach().clone() for master in masters]
    _wait_for_copies()
    optimizer.eval()
    _refresh_model(engine)
    try:
        yield
    finally:
        _wait_for_copies()
        for master, values in zip(masters, kept, strict=True):
            master.data.copy_(values)
        for group in groups:
            group[AVERAGES] = True
        _refresh_model(engine)


def _wait_for_copies() -> None:
    """Wait for copies of a checkpoint, which another stream may still be making of the weights."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _refresh_model(engine: Engine) -> None:
    optimizer = engine.optimizer
    if engine.zero_optimization_stage():
        require(optimizer, "update_lp_params", "deepspeed")()
    elif optimizer is not engine.basic_optimizer:  # 16 bits; in fp32 the model has the master weights themselves
        with torch.no_grad():
            for low, high in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
                torch._foreach_copy_(low, high)
