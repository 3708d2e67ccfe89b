"""Warns of a training loss that is suddenly far above those before it."""

import math
from collections.abc import Callable
from statistics import median

BEFORE = 100
"""How many earlier steps a loss is compared with."""
ENOUGH = 20
SPREADS = 8.0
FRACTION = 0.2
# 1.4826 median absolute deviations are one standard deviation of a normal distribution.
OF_NORMAL = 1.4826


class SpikeWatch:
    """A spike is more than 8 spreads of the losses of the last steps, and a fifth, above their median."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told_at = -BEFORE

    def look(self, before: list[float], step: int, loss: float, grad_norm: float) -> bool:
        """Whether a step's loss is a spike; warn of it, at most once in so many steps.

        `before` are the losses of the last steps, which are in a run's position, and this one is added to them.
        """
        is_spike = False
        if len(before) >= ENOUGH:
            middle = median(before)
            spread = OF_NORMAL * median(abs(value - middle) for value in before)
            is_spike = loss - middle > max(SPREADS * spread, FRACTION * middle)
            if is_spike:
                self._tell(step, loss, middle, len(before), grad_norm)
        if math.isfinite(loss):
            before[:] = [*before[-BEFORE + 1 :], loss]
        return is_spike

    def _tell(self, step: int, loss: float, middle: float, count: int, grad_norm: float) -> None:
        if step - self._told_at < ENOUGH:
            return
        self._told_at = step
        self._say(
            f"[yellow]warning:[/yellow] step {step}: loss {loss:.3f}, where the last {count} had a median of "
            f"{middle:.3f} (gradient norm {grad_norm:.3g}); `zerolora inspect CONFIG --step {step} --ranks N` shows "
            "what was trained on"
        )
