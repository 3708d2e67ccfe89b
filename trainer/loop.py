"""The training loop: steps, metrics, evaluations, checkpoints, and stopping."""

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from trainer.checkpoint.background import SaveFailed
from trainer.checkpoint.checkpoint import Position
from trainer.checkpoint.checkpoint_manager import CheckpointManager
from trainer.config import TrainingSection, UserError
from trainer.memory.oom_recovery import Recovery
from trainer.memory.preflight import peak_memory_gib
from trainer.model.adapter import GradientCheck
from trainer.monitor.expert_load import ExpertLoad
from trainer.monitor.mfu import MfuMeter
from trainer.monitor.profiler import StepProfiler
from trainer.monitor.spikes import SpikeWatch
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks
from trainer.parallel.ranks.progress import PROGRESS, phase
from trainer.parallel.ranks.signals import StopRequest
from trainer.parallel.ranks.start_times import StartTimes
from trainer.parallel.ranks.stragglers import StragglerWatch
from trainer.patches.graphed_loss import GraphedLoss
from trainer.scu.controller import Steering
from trainer.step import StepInFlight, StepResult, train_step
from trainer.tasks.task import BatchSource, StepLoss

NONFINITE_IN_A_ROW = 10


class Reporter(Protocol):
    """Receives metrics; only rank 0 has one."""

    def log(self, step: int, values: dict[str, float]) -> None: ...
    def progress(self, step: int, values: dict[str, float]) -> None: ...


@dataclass(frozen=True)
class Parts:
    """Everything that the loop works with."""

    engine: Engine
    schedule: Any
    loss: StepLoss
    batches: BatchSource
    ranks: Ranks
    reporter: Reporter | None
    stop: StopRequest
    evaluate: Callable[[], tuple[float, dict[str, float]]] | None
    """Returns the value by which evaluations are compared (lower is better), and all metrics."""
    checkpoints: CheckpointManager | None
    """None for a run without checkpoints."""
    recovery: Recovery
    gradient_check: GradientCheck | None = None
    steering: Steering | None = None
    mfu: MfuMeter | None = None
    experts: ExpertLoad | None = None
    profiler: StepProfiler | None = None
    counted: str = "tokens"
    """Unit in which batches are counted."""
    sample: Callable[[int], None] | None = None
    """Generates samples at a step; every rank must call it."""
    sample_every: int = 0
    spikes: SpikeWatch | None = None
    stragglers: StragglerWatch | None = None
    skipped: Callable[[], dict[str, int]] = dict
    """Returns the records skipped so far by `dataset.on_bad_record: skip`, by source."""
    report_start: Callable[[StartTimes], None] | None = None
    """Called at the end of the first step with the times of the phases before it."""


class Loop:
    """Runs optimizer steps from `position` to `total_steps`."""

    def __init__(self, parts: Parts, training: TrainingSection, position: Position, total_steps: int) -> None:
        self._parts = parts
        self._training = training
        self.position = position
        self._total_steps = total_steps
        self._saved_at = position.step
        self._save_asked, self._saved_time, self._save_s = False, time.monotonic(), 0.0
        self.stopped_early = False
        """Whether `training.early_stopping` ended the run."""
        self._gradient_check = parts.gradient_check
        # Step, its numbers, and metrics known at its launch.
        self._in_flight: tuple[int, StepInFlight, dict[str, float]] | None = None
        self._before: StepInFlight | None = None
        self._started = 0.0
        self._stop = False
        self._start_times: dict[str, float] = {}

    def run(self) -> None:
        """Train until all steps are done, a signal arrives, or early stopping; then save.

        Raises UserError, after saving, for unusable data, which all ranks find in the same step. On a GPU the numbers
        of a step are read during the next one, so that the GPU never waits for the host.
        """
        self._parts.stop.training = True
        self._parts.engine.train()  # models are loaded in evaluation mode, without dropout and recomputation
        try:
            with exclude_from_garbage_collection():
                while self.position.step < self._total_steps and not self.stopped_early and not self._stop:
                    self._step()
                    if self._parts.stragglers is not None:
                        self._parts.stragglers.compare(self.position.step)
                    self._evaluate_if_due()
                    self._sample_if_due()
                    self._save_if_due()
        except UserError as error:
            self._save_and_raise(error)
        self._settle()
        if self._parts.profiler is not None:
            self._parts.profiler.finish()
        self._save(at_the_end=True)
        self._parts.stop.agree()

    def _save_and_raise(self, error: UserError) -> NoReturn:
        """Save a run that is stopped by a mistake of the user, and mention it in the error."""
        # If one rank runs out of memory, the others are within the step and cannot save.
        if error.exit_code != UserError.exit_code or not self.position.step:
            raise error
        self._settle()
        self._save(at_the_end=True)
        raise UserError(
            f"{error}; training stopped after step {self.position.step}, which is saved; resume it with "
            "training.resume_from_checkpoint=latest"
        ) from error

    def _step(self) -> None:
        if self._before is None:
            self._started = time.perf_counter()
        parts, position = self._parts, self.position
        PROGRESS.at_step(position.step + 1)
        if parts.profiler is not None:
            parts.profiler.before_step(position.step + 1)
        launched, consumed = parts.recovery.attempt(position.step + 1, self._saved_at, self._launch)
        if self._gradient_check is not None:
            self._gradient_check.finish()
            self._gradient_check = None
        position.step += 1
        position.offset += consumed
        if parts.batches.samples_per_epoch and position.offset >= parts.batches.samples_per_epoch:
            position.epoch, position.offset = position.epoch + 1, 0
        known = {"train/learning_rate": float(parts.schedule.get_last_lr()[0])}
        known["perf/graphed"] = parts.loss.take_fraction() if isinstance(parts.loss, GraphedLoss) else 0.0
        self._in_flight = position.step, launched, known
        if not launched.on_device:
            self._settle()

    def _launch(self) -> tuple[StepInFlight, int]:
        """Fetch and start the step at this position; also returns the number of samples that all ranks used."""
        parts, position = self._parts, self.position
        own_time = parts.stragglers.own_time(on_device=False) if parts.stragglers is not None else nullcontext()
        with phase("data"), own_time:
            batches, consumed = parts.batches.step_batches(position.epoch, position.offset)
        if parts.mfu is not None:
            parts.mfu.count(position.step + 1, batches)
        launched = train_step(
            parts.engine,
            parts.loss,
            batches,
            parts.ranks,
            step=position.step + 1,
            max_grad_norm=self._training.max_grad_norm,
            steering=parts.steering,
            stop=bool(parts.stop),
            save=self._wants_save(),
            before_update=self._before_update,
            recovery=parts.recovery,
            stragglers=parts.stragglers,
        )
        return launched, consumed

    def _before_update(self) -> None:
        self._settle()
        if self._parts.checkpoints is not None:
            self._parts.checkpoints.make_updates_wait()

    def _wants_save(self) -> bool:
        """Return whether `save_minutes` have passed on rank 0; the others get this from the step's result."""
        minutes = self._training.save_minutes
        return self._parts.ranks.is_main and bool(minutes) and time.monotonic() - self._saved_time > 60.0 * minutes

    def _settle(self) -> None:
        """Wait for the result of the step in flight, if any; called before the next update or when it is needed."""
        if self._in_flight is None:
            return
        (step, launched, known), self._in_flight = self._in_flight, None
        parts, position = self._parts, self.position
        result = launched.result()
        self._check_finite(step, result)
        if result.applied:
            parts.schedule.step()
        position.tokens += result.tokens
        position.target_tokens += result.target_tokens
        self._stop = result.stop
        self._save_asked = self._save_asked or result.save
        if self._before is None:
            seconds = time.perf_counter() - self._started
        else:
            seconds = launched.seconds_since(self._before)
        self._before = launched
        if (start := PROGRESS.end_start()) is not None:
            self._start_times = start.values()
            if parts.report_start is not None:
                parts.report_start(start)
        self._report(step, result, known, seconds)

    def _check_finite(self, step: int, result: StepResult) -> None:
        """Raise FloatingPointError if a step was not finite and the run must stop; it has not changed any weight."""
        position = self.position
        position.nonfinite_in_a_row = 0 if result.applied else position.nonfinite_in_a_row + 1
        if result.applied and math.isfinite(result.loss_sum):
            return
        position.nonfinite_steps += 1
        # fp16 finds its loss scale by trial, with a few skipped steps at the start.
        searching = self._parts.engine.fp16_enabled() and not result.applied
        patience = NONFINITE_IN_A_ROW * 2 if searching else NONFINITE_IN_A_ROW
        if (self._training.on_nonfinite == "skip" or searching) and position.nonfinite_in_a_row <= patience:
            return
        PROGRESS.attribute_failures_to(step)
        if result.nonfinite_ranks and not result.own_is_nonfinite:
            one = result.nonfinite_rank
            who = f"{result.nonfinite_ranks} other ranks" if one is None else f"rank {one}"
            raise FloatingPointError(f"step {step}: {who} had a loss that is not finite; no weight was changed by it")
        raise FloatingPointError(
            f"step {step}: the loss or a gradient is not finite; no weight was changed by it. Lower "
            "training.learning_rate, use precision: bf16, set training.on_nonfinite: skip, or check the data with "
            "`zerolora inspect`"
        )

    def _report(self, step: int, result: StepResult, known: dict[str, float], seconds: float) -> None:
        parts, position = self._parts, self.position
        is_logged = step % self._training.logging_steps == 0 or step == self._total_steps
        # Summed over all ranks, so that all must call it.
        expert_load = parts.experts.values() if is_logged and parts.experts is not None else {}
        pairs = parts.loss.values() if is_logged else {}
        if parts.reporter is None:
            return
        values = {
            "train/loss": result.loss_sum / (result.target_weight or 1.0),
            "train/grad_norm": result.grad_norm,
            f"train/{parts.counted}": float(position.tokens),
            "train/nonfinite_steps": float(position.nonfinite_steps),
            "perf/step_ms": seconds * 1e3,
            f"perf/{parts.counted}_per_second": result.tokens / seconds,
            f"perf/{parts.counted}_per_second_per_gpu": result.tokens / seconds / parts.ranks.world_size,
            "memory/peak_gib": peak_memory_gib(),
        } | known
        if samples := parts.batches.samples_per_epoch:
            values["train/epoch"] = position.epoch + position.offset / samples
        if parts.counted == "tokens":
            values["train/target_tokens"] = float(position.target_tokens)
        values |= {f"data/skipped/{source}": float(count) for source, count in parts.skipped().items()}
        if parts.mfu is not None:
            values |= parts.mfu.values(step, seconds)
        if parts.steering is not None:
            values |= parts.steering.metrics()
        if parts.spikes is not None:
            loss = values["train/loss"]
            position.spikes += parts.spikes.check(position.latest_losses, step, loss, result.grad_norm)
            values["train/spikes"] = float(position.spikes)
        if self._save_s:
            values["perf/save_ms"], self._save_s = self._save_s * 1e3, 0.0
        parts.reporter.progress(step, values)
        if is_logged:
            values, self._start_times = values | expert_load | pairs | self._start_times, {}
            parts.reporter.log(step, values)

    def _evaluate_if_due(self) -> None:
        """Evaluate every `eval_steps`, track the best one, and decide on early stopping."""
        training, position, parts = self._training, self.position, self._parts
        if parts.evaluate is None or not training.eval_steps or position.step % training.eval_steps:
            return
        self._settle()
        self._before = None  # the evaluation does not count as time of the next step
        compared, values = parts.evaluate()
        position.last_evaluation, position.evaluated_at = values.get("eval/loss"), position.step
        if parts.reporter is not None:
            parts.reporter.log(position.step, values)
        if compared < position.best_loss - training.early_stopping_threshold:
            position.best_loss, position.best_step, position.worse_in_a_row = compared, position.step, 0
            if training.best_checkpoint:
                self._save()
        else:
            position.worse_in_a_row += 1
            self.stopped_early = bool(training.early_stopping) and position.worse_in_a_row >= (
                training.early_stopping or 0
            )

    def _sample_if_due(self) -> None:
        parts, step = self._parts, self.position.step
        if parts.sample is None or not parts.sample_every or step % parts.sample_every or step == self._total_steps:
            return
        self._settle()
        self._before = None
        parts.sample(step)

    def _save_if_due(self) -> None:
        steps = self._training.save_steps
        if self._save_asked or (steps and self.position.step % steps == 0):
            self._save()

    def _save(self, *, at_the_end: bool = False) -> None:
        """Save a checkpoint, completely at the end; a full disk does not stop training, and the next save tries again.

        The copy is launched before waiting for the step's result, after which the device is idle.
        """
        parts, self._save_asked = self._parts, False
        if parts.checkpoints is None:
            return
        if self._saved_at != self.position.step:
            self._start_save(parts.checkpoints, at_the_end=at_the_end)
        if at_the_end:
            parts.checkpoints.settle()

    def _start_save(self, checkpoints: CheckpointManager, *, at_the_end: bool) -> None:
        parts, started = self._parts, time.perf_counter()
        checkpoints.copy(parts.engine)
        waiting = time.perf_counter()
        self._settle()
        self._before, started = None, started + time.perf_counter() - waiting
        try:
            checkpoints.save(parts.engine, self.position, parts.schedule, parts.batches, parts.steering)
        except SaveFailed:
            if at_the_end:
                raise
        else:
            self._saved_at = self.position.step
        self._save_asked, self._saved_time, self._save_s = False, time.monotonic(), time.perf_counter() - started


@contextmanager
def exclude_from_garbage_collection() -> Iterator[None]:
    """Exclude all existing objects from garbage collection within the block.

    Traversing the half a million objects of model and libraries would delay a rank by tenths of a second in some steps,
    while the others wait.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
