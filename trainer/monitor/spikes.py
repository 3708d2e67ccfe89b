"""Warnings about spikes of the training loss."""

import math
from collections.abc import Callable
from statistics import median
from typing import Protocol

from trainer.monitor.hooks import FinishedStep, Hook

BEFORE = 100
"""Number of earlier steps that a loss is compared with."""
ENOUGH = 20
SPREADS = 8.0
FRACTION = 0.2
MAD_TO_STD = 1.4826
"""Standard deviation of a normal distribution in median absolute deviations."""


class History(Protocol):
    """The recent losses of a run, which checkpoints keep."""

    latest_losses: list[float]
    spikes: int


class SpikeWatch(Hook):
    """Detects losses that exceed the median of the last steps by 8 standard deviations and a fifth of the median."""

    def __init__(self, say: Callable[[str], None], history: History) -> None:
        self._say, self._history = say, history
        self._warned_at = -BEFORE

    def after_step(self, step: FinishedStep) -> dict[str, float]:
        """Count the spikes of the run, and add the step's loss to its history."""
        self._history.spikes += self.check(step.number, step.loss, step.grad_norm)
        return {"train/spikes": float(self._history.spikes)}

    def check(self, step: int, loss: float, grad_norm: float) -> bool:
        """Return whether a step's loss is a spike; warn at most once in `ENOUGH` steps."""
        is_spike, before = False, self._history.latest_losses
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
