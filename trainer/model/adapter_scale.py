"""How strongly an adapter counts: W + c s B A for a factor c."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def scaled_adapter(model: Any, factor: float) -> Iterator[None]:
    """The PEFT model with `factor` of its adapter's update."""
    trained = [(scaling, dict(scaling)) for scaling in _scalings(model)]
    scale_adapter(model, factor)
    try:
        yield
    finally:
        for scaling, values in trained:
            scaling.update(values)


def scale_adapter(model: Any, factor: float) -> None:
    """Let the update of every LoRA layer count `factor` times what it does."""
    for scaling in _scalings(model):
        for name in scaling:
            scaling[name] *= factor


def _scalings(model: Any) -> list[dict[str, float]]:
    from peft.tuners.lora import LoraLayer

    return [module.scaling for module in model.modules() if isinstance(module, LoraLayer)]
