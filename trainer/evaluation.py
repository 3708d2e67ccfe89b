"""What a run measures in addition to its training loss: the held-out loss, and answers to the sample prompts."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.memory.peak import release_if_fragmented
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.progress import phase
from trainer.step import evaluate_loss
from trainer.tasks.task import StepLoss, Task


@dataclass(frozen=True)
class Measurement:
    """What differs in a run that is made for its held-out losses.

    It writes no checkpoints and no report: an interrupted one starts again.
    """

    evaluate: Callable[[Engine], tuple[float, int]]
    """Held-out loss of the engine's model, nats per target token, and the number of target tokens."""
    at_the_end: Callable[[Engine], None]
    """What else is measured on the trained model."""


class Evaluation:
    """Of one run, on its engine; a `measurement` has a loss of its own."""

    def __init__(
        self,
        task: Task,
        engine: Engine,
        loss: StepLoss,
        say: Callable[[str], None],
        measurement: Measurement | None = None,
        *,
        held_out: bool,
    ) -> None:
        """`held_out`: whether there is anything to evaluate on."""
        self.has_data = held_out
        self._task, self._engine, self._loss, self._say, self._measurement = task, engine, loss, say, measurement

    @phase("evaluate")
    def loss(self) -> tuple[float, int]:
        """The held-out loss of a target, and the number of targets; every rank must call it."""
        if self._measurement is not None:
            return self._measurement.evaluate(self._engine)
        found = evaluate_loss(self._engine, self._loss, self._task.evaluation())
        release_if_fragmented()
        if not math.isfinite(found[0]):
            self._say(
                f"[yellow]warning:[/yellow] the held-out loss is {found[0]}: a batch of dataset.evaluation gave a loss "
                "that is not finite, and this evaluation is never taken for the best; look at the longest and most "
                "unusual samples, or use training.precision: bf16 where it is fp16"
            )
        return found

    def sample(self, when: str, step: int, folder: Any) -> None:
        """What the model makes of the sample prompts, kept in the run's `folder`; every rank must call it."""
        self._task.sample(self._engine, when, step, folder)
