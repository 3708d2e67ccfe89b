"""The evaluations of a run: the held-out loss, and samples."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.progress import phase
from trainer.step import evaluate_loss
from trainer.tasks.task import StepLoss, Task

FRAGMENTED = 0.1
"""Fraction of the GPU's memory in free pieces of used blocks above which the cache is emptied."""


@dataclass(frozen=True)
class Measurement:
    """The custom evaluation of a run that only measures held-out losses, without checkpoints and report."""

    evaluate: Callable[[Engine], tuple[float, int]]
    """Returns the held-out loss of the engine's model in nats per target token, and the number of target tokens."""
    at_the_end: Callable[[Engine], None]
    """Further measurements of the trained model."""


class Evaluation:
    """Evaluates the model of a run; a `measurement` replaces the held-out loss."""

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
        self.has_data = held_out
        self._task, self._engine, self._loss, self._say, self._measurement = task, engine, loss, say, measurement

    @phase("evaluate")
    def loss(self) -> tuple[float, dict[str, float]]:
        """Return the held-out loss per target and further metrics of it; every rank must call it."""
        if self._measurement is not None:
            loss, _ = self._measurement.evaluate(self._engine)
        else:
            loss, _ = evaluate_loss(self._engine, self._loss, self._task.evaluation())
            _release_if_fragmented()
        if not math.isfinite(loss):
            self._say(
                f"[yellow]warning:[/yellow] the held-out loss is {loss}: a batch of dataset.evaluation has a loss "
                "that is not finite, so this evaluation cannot be the best; check the longest and most unusual "
                "samples, or use training.precision: bf16 instead of fp16"
            )
        measured = self._loss.values(training=False)
        if self._task.counted == "tokens" and not measured:
            measured = {"eval/bpt": loss / math.log(2), "eval/perplexity": math.exp(min(loss, 700.0))}
        return loss, measured

    def sample(self, when: str, step: int, folder: Any) -> None:
        """Generate samples for the sample prompts and store them in the run's `folder`; every rank must call it."""
        self._task.sample(self._engine, when, step, folder)


def _release_if_fragmented() -> bool:
    """Empty torch's cache if it is fragmented, as after an evaluation with other shapes than training."""
    if not torch.cuda.is_available():
        return False
    in_pieces = torch.cuda.memory_stats().get("inactive_split_bytes.all.current", 0)
    if in_pieces <= FRAGMENTED * torch.cuda.mem_get_info()[1]:
        return False
    torch.cuda.empty_cache()
    return True
