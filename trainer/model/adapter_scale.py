"""Scaling of an adapter's update by a factor c: W + c s B A."""

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
