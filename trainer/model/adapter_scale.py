"""Scale an adapter's update by a factor c: W + c s B A.

For an adapter that was trained too long, a fraction of its update is often better than all of it (docs/lab/scu.md).
"""

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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


def parse_scale(text: str) -> float:
    """Parse the value of --scale."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value <= 10.0:
        raise argparse.ArgumentTypeError(f"{text}: must be a factor above 0 and at most 10, such as 0.5")
    return value
