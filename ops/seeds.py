"""Seeds for dropout masks, drawn on the device and replayed when a pass is repeated."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

_LOCAL = threading.local()


class Seeds:
    """Records the seeds drawn in one pass and replays them in the next, as a CUDA graph cannot rewind the generator."""

    def __init__(self) -> None:
        self._drawn: list[Tensor] = []

    def record(self) -> AbstractContextManager[None]:
        """Record every seed drawn within the context, on this thread."""
        return _override_draw(self._draw_and_record)

    def replay(self) -> AbstractContextManager[None]:
        """Replay the recorded seeds, in order, for draws within the context, on this thread."""
        recorded = iter(self._drawn)
        return _override_draw(lambda _, __: next(recorded))

    def _draw_and_record(self, device: torch.device, count: int) -> Tensor:
        self._drawn.append(_draw_new_seeds(device, count))
        return self._drawn[-1]


def _draw_new_seeds(device: torch.device, count: int) -> Tensor:
    return torch.randint(0, 2**62, (count,), device=device)


@contextmanager
def _override_draw(draw: Callable[[torch.device, int], Tensor]) -> Iterator[None]:
    before, _LOCAL.draw = getattr(_LOCAL, "draw", _draw_new_seeds), draw
    try:
        yield
    finally:
        _LOCAL.draw = before


def draw_seed(x: Tensor, p: float, count: int = 1) -> Tensor | None:
    """Draw int64 seeds [count] from torch's generator on x's device; return None if p is 0.

    Recomputation draws the same seeds again; in CUDA graphs, `Seeds` records and replays them.
    """
    if p == 0.0:
        return None
    return getattr(_LOCAL, "draw", _draw_new_seeds)(x.device, count)
