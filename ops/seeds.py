"""Seeds of dropout masks, drawn on the device and replayed when a pass is repeated."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_DRAWING = threading.local()


class Seeds:
    """Seeds drawn in one pass, to be replayed in the next: a CUDA graph cannot rewind the generator."""

    def __init__(self) -> None:
        self._drawn: list[Tensor] = []

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record every seed drawn within the context, on this thread."""
        before, _DRAWING.draw = getattr(_DRAWING, "draw", _fresh_seed), self._keep
        try:
            yield
        finally:
            _DRAWING.draw = before

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Return the recorded seeds, in order, to every draw within the context, on this thread."""
        left = iter(self._drawn)
        before, _DRAWING.draw = getattr(_DRAWING, "draw", _fresh_seed), lambda _: next(left)
        try:
            yield
        finally:
            _DRAWING.draw = before

    def _keep(self, device: torch.device) -> Tensor:
        self._drawn.append(_fresh_seed(device))
        return self._drawn[-1]


def _fresh_seed(device: torch.device) -> Tensor:
    return torch.randint(0, 2**62, (1,), device=device)


def draw_seed(x: Tensor, p: float) -> Tensor | None:
    """Draw one int64 from torch's generator on the device of x: recomputation and CUDA graphs draw it again."""
    if p == 0.0:
        return None
    seed: Tensor = getattr(_DRAWING, "draw", _fresh_seed)(x.device)
    return seed
