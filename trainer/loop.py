"""The training loop: steps, metrics, evaluations, checkpoints, and when to end."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from trainer.adapt import GradientCheck
from trainer.config import TrainingSection
from trainer.ranks import Ranks
from trainer.signals import StopRequest
from trainer.steering import Steering
from trainer.step import StepResult, TokenLoss, train_step

NONFINITE_IN_A_ROW = 10


@dataclass
class Position:
    """Where a run stands; all of it is in a checkpoint."""

    step: int = 0
    epoch: int = 0
    offset: int = 0
    """Samples of the epoch that were used, over all ranks."""
    tokens: int = 0
    target_tokens: int = 0
    last_evaluation: float | None = None
    evaluated_at: int = -1
    """Step of the last evaluation."""
    best_loss: float = math.inf
    best_step: int = 0
    worse_in_a_row: int = 0
    nonfinite_in_a_row: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return asdict(self) | {"best_loss": None if math.isinf(self.best_loss) else self.best_loss}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> "Position":
        """The inverse of `to_dict`; other keys are ignored."""
        known = {key: state[key] for key in cls.__dataclass_fields__ if key in state}
        if known.get("best_loss") is None:
            known["best_loss"] = math.inf
        return cls(**known)


class Reporter(Protocol):
    """Where numbers go; rank 0 has a real one."""

    def log(self, step: int, values: dict[str, float]) -> None: ...
    def progress(self, step: int, values: dict[str, float]) -> None: ...


@dataclass(frozen=True)
class Parts:
    """What the loop works with."""

    engine: Any
    schedule: Any
    token_loss: TokenLoss
    batches: Any
    samples_per_epoch: int | None
    """None for a stream, which is one epoch without end."""
    ranks: Ranks
    reporter: Reporter | None
    stop: StopRequest
    evaluate: Callable[[], tuple[float, int]] | None
    save: Callable[[Position], None]
    gradient_check: GradientCheck | None = None
    steering: Steering | None = None


class Loop:
    """Runs optimizer steps from `position` to `total_steps`."""

    def __init__(self, parts: Parts, training: TrainingSection, position: Position, total_steps: int) -> None:
        self._parts = parts
        self._training = training
        self.position = position
        self._total_steps = total_steps
        self._saved_at = position.step
        self._stopped_early = False
        self._gradient_check = parts.gradient_check
        self._learning_rate = 0.0

    def run(self) -> None:
        """Train until the steps are done, a signal arrives, or the held-out loss stops falling; then save."""
        self._parts.stop.training = True
        while self.position.step < self._total_steps and not self._stopped_early:
            result, seconds = self._step()
            self._report(result, seconds)
            if result.stop:
                break
            self._evaluate_if_due()
            self._save_if_due()
        self._save()

    def _step(self) -> tuple[StepResult, float]:
        started = time.perf_counter()
        parts, position = self._parts, self.position
        batches, consumed = parts.batches.step(position.epoch, position.offset)
        result = train_step(
            parts.engine,
            parts.token_loss,
            batches,
            parts.ranks,
            step=position.step + 1,
            max_grad_norm=self._training.max_grad_norm,
            steering=parts.steering,
            stop=bool(parts.stop),
        )
        if self._gradient_check is not None:
            self._gradient_check.finish()
            self._gradient_check = None
        self._check_finite(result)
        self._learning_rate = float(parts.schedule.get_last_lr()[0])
        if result.applied:
            parts.schedule.step()
        position.step += 1
        position.offset += consumed
        position.tokens += result.tokens
        position.target_tokens += result.target_tokens
        if parts.samples_per_epoch and position.offset >= parts.samples_per_epoch:
            position.epoch, position.offset = position.epoch + 1, 0
        return result, time.perf_counter() - started

    def _check_finite(self, result: StepResult) -> None:
        """A step that was not applied changed no weight: stop, or go on to the next one."""
        position = self.position
        position.nonfinite_in_a_row = 0 if result.applied else position.nonfinite_in_a_row + 1
        if result.applied and math.isfinite(result.loss_sum.item()):
            return
        # fp16 looks for its loss scale by trial: a few skipped steps are its normal beginning.
        searching = self._parts.engine.fp16_enabled() and not result.applied
        patience = NONFINITE_IN_A_ROW * 2 if searching else NONFINITE_IN_A_ROW
        if (self._training.on_nonfinite == "skip" or searching) and position.nonfinite_in_a_row <= patience:
            return
        raise FloatingPointError(
            f"step {position.step + 1}: the loss or a gradient is not finite; no weight was changed by it. Lower "
            "training.learning_rate, use precision: bf16, set training.on_nonfinite: skip, or look at the data with "
            "`zerolora inspect`"
        )

    def _report(self, result: StepResult, seconds: float) -> None:
        parts, position = self._parts, self.position
        if parts.reporter is None:
            return
        values = {
            "train/loss": result.loss_sum.item() / max(result.target_tokens, 1),
            "train/grad_norm": result.grad_norm,
            "train/learning_rate": self._learning_rate,
            "train/epoch": position.epoch + position.offset / (parts.samples_per_epoch or math.inf),
            "train/tokens": float(position.tokens),
            "train/target_tokens": float(position.target_tokens),
            "perf/step_ms": seconds * 1e3,
            "perf/tokens_per_second": result.tokens / seconds,
            "perf/tokens_per_second_per_gpu": result.tokens / seconds / parts.ranks.world_size,
            "memory/peak_gib": peak_memory_gib(),
        }
        if parts.steering is not None:
            values |= parts.steering.metrics()
        parts.reporter.progress(position.step, values)
        if position.step % self._training.logging_steps == 0 or position.step == self._total_steps:
            parts.reporter.log(position.step, values)

    def _evaluate_if_due(self) -> None:
        """Evaluate every `eval_steps`; remember the best, and whether to go on."""
        training, position, parts = self._training, self.position, self._parts
        if parts.evaluate is None or not training.eval_steps or position.step % training.eval_steps:
            return
        loss, _ = parts.evaluate()
        position.last_evaluation, position.evaluated_at = loss, position.step
        report_evaluation(parts.reporter, position.step, loss)
        if loss < position.best_loss - training.early_stopping_threshold:
            position.best_loss, position.best_step, position.worse_in_a_row = loss, position.step, 0
            if training.best_checkpoint:
                self._save()
        else:
            position.worse_in_a_row += 1
            self._stopped_early = bool(training.early_stopping) and position.worse_in_a_row >= (
                training.early_stopping or 0
            )

    def _save_if_due(self) -> None:
        if self._training.save_steps and self.position.step % self._training.save_steps == 0:
            self._save()

    def _save(self) -> None:
        if self._saved_at != self.position.step:
            self._parts.save(self.position)
            self._saved_at = self.position.step


def report_evaluation(reporter: Reporter | None, step: int, loss: float) -> None:
    """Held-out loss in nats a token, bits a token, and perplexity."""
    if reporter is not None:
        reporter.log(
            step, {"eval/loss": loss, "eval/bpt": loss / math.log(2), "eval/perplexity": math.exp(min(loss, 700.0))}
        )


def peak_memory_gib() -> float:
    """Largest memory this rank has used: on its GPU, or of the process on a CPU; GiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
