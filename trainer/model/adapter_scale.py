"""Scale an adapter's update by a factor c, W + c s B A, which can be chosen on held-out text.

For an adapter that was trained too long, a fraction of its update is often better than all of it (docs/lab/scu.md).
"""

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

SCALES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Parts of an update from which the best is chosen."""


@contextmanager
def scaled_adapter(model: Any, factor: float) -> Iterator[None]:
    """Scale the adapter's update by `factor` within the context."""
    trained = [(scaling, dict(scaling)) for scaling in _scalings(model)]
    scale_adapter(model, factor)
    try:
        yield
    finally:
        for scaling, values in trained:
            scaling.update(values)


def scale_adapter(model: Any, factor: float) -> None:
    """Multiply the scaling of every LoRA layer by `factor`."""
    for scaling in _scalings(model):
        for name in scaling:
            scaling[name] *= factor


def _scalings(model: Any) -> list[dict[str, float]]:
    from peft.tuners.lora import LoraLayer

    return [module.scaling for module in model.modules() if isinstance(module, LoraLayer)]


def best_scale(losses_FD: NDArray[np.float64]) -> int:
    """Return the row with the lowest sum, of losses by factor F and document D."""
    return int(np.argmin(losses_FD.sum(1)))


def cross_validated_losses(losses_FD: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each document's loss at the scale that is best on the half of the documents without it."""
    chosen = np.empty(losses_FD.shape[1])
    for half in (0, 1):
        chosen[half::2] = losses_FD[best_scale(losses_FD[:, 1 - half :: 2]), half::2]
    return chosen


def parse_scale(text: str) -> float:
    """Parse the value of --scale."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value <= 10.0:
        raise argparse.ArgumentTypeError(f"{text}: must be a factor above 0 and at most 10, such as 0.5")
    return value
