"""Warnings about spikes of the training loss."""

import math
from collections.abc import Callable
from statistics import median

BEFORE = 100
"""Number of earlier steps that a loss is compared with."""
ENOUGH = 20
SPREADS = 8.0
FRACTION = 0.2
MAD_TO_STD = 1.4826
"""Standard deviation of a normal distribution in median absolute deviations."""


class SpikeWatch:
    """Detects losses that exceed the median of the last steps by 8 standard deviations and a fifth of the median."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._warned_at = -BEFORE

    def check(self, before: list[float], step: int, loss: float, grad_norm: float) -> bool:
        """Return whether a step's loss is a spike; warn at most once in `ENOUGH` steps.

        `before` holds the losses of the last steps; this one is appended.
        """
        is_spike = False
        if len(before) >= ENOUGH:
            middle = median(before)
            spread = MAD_TO_STD * median(abs(value - middle) for value in before)
            is_spike = loss - middle > max(SPREADS * spread, FRACTION * middle)
            if is_spike:
                self._warn(step, loss, middle, len(before), grad_norm)
        if math.isfinite(loss):
            before[:] = [*before[-BEFORE + 1 :], loss]
        return is_spike

    def _warn(self, step: int, loss: float, middle: float, count: int, grad_norm: float) -> None:
        if step - self._warned_at < ENOUGH:
            return
        self._warned_at = step
        self._say(
            f"[yellow]warning:[/yellow] step {step}: loss {loss:.3f}, where the last {count} had a median of "
            f"{middle:.3f} (gradient norm {grad_norm:.3g}); `zerolora inspect CONFIG --step {step} --ranks N` shows "
            "what was trained on"
        )
