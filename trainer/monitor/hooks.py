"""What follows the steps of a run: the loop calls every hook before, within and after each step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FinishedStep:
    """A step after its numbers have arrived from the device."""

    number: int
    loss: float
    grad_norm: float
    seconds: float
    is_logged: bool
    """Whether its metrics go to metrics.jsonl; the same on every rank."""


class Hook:
    """Does nothing; each hook overrides what it needs. All ranks call hooks in the same order, so they may communicate.

    Only `finish` is not called for a run that fails.
    """

    def before_step(self, step: int) -> None:
        """Called before the micro-batches of a step are fetched."""

    def with_batches(self, step: int, batches: Sequence[Any]) -> None:
        """Called with this rank's micro-batches of a step, again if the step is repeated with smaller ones."""

    def after_launch(self, step: int) -> None:
        """Called when the step is launched; on a GPU its numbers are not known yet."""

    def after_step(self, step: FinishedStep) -> Mapping[str, float]:
        """Return metrics of a finished step; on a GPU called when the next one is launched."""
        return {}

    def between_steps(self, step: int, settle: Callable[[], None]) -> None:
        """Called after step `step`; whoever takes long calls `settle`, so that no step is charged for the time."""

    def finish(self) -> None:
        """Called after the last step."""
