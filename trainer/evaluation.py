"""Evaluation during a run: held-out loss, scores, and samples."""

import math
from collections.abc import Callable, Iterable
from typing import Any

from rich.markup import escape

from trainer.config import UserError
from trainer.config.evaluation_section import LOSS_METRICS
from trainer.parallel.engine.optimizer import use_averaged_weights
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.progress import phase
from trainer.step import evaluate_loss
from trainer.tasks.task import StepLoss, Task


class Evaluation:
    def __init__(
        self,
        task: Task,
        engine: Engine,
        loss: StepLoss,
        log: Callable[[str], None],
        *,
        has_held_out: bool,
        has_scores: bool = False,
        best_metric: str = "loss",
    ) -> None:
        """Set up evaluation. `has_scores` refers to the task's scores, and `best_metric` is `training.best_metric`."""
        self.has_data, self.is_defined, self._best = has_held_out, has_held_out or has_scores, best_metric
        self.sign = 1.0
        """-1 if a higher value of the best metric is better, otherwise 1."""
        self._task, self._engine, self._loss, self._log = task, engine, loss, log

    def measure(self, *, include_base: bool = False) -> tuple[float, dict[str, float]]:
        """Return the metric `training.best_metric`, negated if higher is better, and all metrics; a collective call.

        With `include_base`, also measure the base model's scores.
        """
        values: dict[str, float] = {}
        with use_averaged_weights(self._engine):
            if self.has_data:
                values["eval/loss"], further = self.measure_loss()
                values |= further
            scores = self._task.compute_scores(self._engine)
            values |= {f"eval/{name}": value for name, value in scores.values.items()}
            if include_base and scores.values:
                base = self._task.compute_scores(self._engine, base=True)
                values |= {f"base/{name}": value for name, value in base.values.items()}
        if scores.values:
            self._log("scores  " + "  ".join(f"{escape(name)} {value:.4f}" for name, value in scores.values.items()))
        if (best := f"eval/{self._best}") not in values and self._best != "loss":
            known = ", ".join(sorted(scores.values))
            raise UserError(f"training.best_metric={self._best}: was not measured; use loss or one of {known}")
        self.sign = 1.0 if self._best in (*LOSS_METRICS, *scores.lower_is_better) else -1.0
        return self.sign * values.get(best, math.nan), values

    @phase("evaluate")
    def measure_loss(self) -> tuple[float, dict[str, float]]:
        """Return the held-out loss per target token, and metrics derived from it; a collective call."""
        loss = self.compute_held_out_loss()
        if not math.isfinite(loss):
            self._log(
                f"[yellow]warning:[/yellow] the held-out loss is {loss}: a batch of dataset.evaluation has a loss "
                "that is not finite, so this evaluation cannot be the best; check the longest and most unusual "
                "samples; in fp16, training.precision: bf16 may also help"
            )
        return loss, self._loss.pop_metrics(training=False) or self._task.compute_loss_metrics(loss)

    def compute_held_out_loss(self) -> float:
        """Return the held-out loss in nats per target token; a collective call."""
        return self.compute_mean_loss(self._task.build_evaluation_batches())

    def compute_mean_loss(self, batches: Iterable[Any]) -> float:
        """Return the mean loss over `batches` in nats per target token; a collective call."""
        return evaluate_loss(self._engine, self._loss, batches)

    def sample(self, when: str, step: int, folder: Any) -> None:
        """Generate samples for the sample prompts and store them in the run's `folder`; a collective call."""
        with use_averaged_weights(self._engine):
            self._task.generate_samples(self._engine, when, step, folder)
