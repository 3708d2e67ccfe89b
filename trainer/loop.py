"""The training loop: steps, metrics, evaluations, checkpoints, and stopping."""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from trainer.checkpoint.background import SaveError
from trainer.checkpoint.checkpoint import Position
from trainer.checkpoint.checkpoint_manager import CheckpointManager
from trainer.config import TrainingSection, UserError
from trainer.contract.rank_errors import OtherRankError
from trainer.memory.preflight import read_peak_memory_gib
from trainer.monitor.hooks import FinishedStep, Hook
from trainer.monitor.metrics import Metrics
from trainer.parallel.ranks.progress import PROGRESS, phase
from trainer.parallel.ranks.signals import StopRequest
from trainer.patches.graphed_loss import GraphedLoss
from trainer.step import StepContext, StepInFlight, StepResult, train_step

MAX_CONSECUTIVE_NONFINITE = 10


class RemoteNonfiniteError(FloatingPointError, OtherRankError):
    """Raised if the loss on another rank is not finite."""


class Loop:
    """Runs optimizer steps from `position` to `total_steps`."""

    def __init__(
        self,
        context: StepContext,
        hooks: Sequence[Hook],
        training: TrainingSection,
        position: Position,
        total_steps: int,
        *,
        stop: StopRequest,
        reporter: Metrics | None,
        evaluate: Callable[[], tuple[float, dict[str, float]]] | None,
        checkpoints: CheckpointManager | None,
        batch_units: Sequence[str],
    ) -> None:
        """Prepare the loop; `evaluate` returns the metric to compare (lower is better) and all metrics.

        `batch_units` is `Task.batch_units`. Only rank 0 has a `reporter`; without `checkpoints` nothing is saved.
        """
        self._context, self._hooks, self._training, self._total_steps = context, hooks, training, total_steps
        self._stop_request, self._reporter, self._evaluate = stop, reporter, evaluate
        self._checkpoints, self._batch_units = checkpoints, batch_units
        self.position = position
        self._saved_step = position.step
        self._save_requested, self._saved_time, self._save_s = False, time.monotonic(), 0.0
        self.stopped_early = False
        """Whether `training.early_stopping` ended the run."""
        self.latest: StepResult | None = None
        """Result of the last finished step."""
        # The number of the step in flight, the step itself, and the metrics known at its launch.
        self._in_flight: tuple[int, StepInFlight, dict[str, float]] | None = None
        self._previous: StepInFlight | None = None
        self._started = 0.0
        self._stop = False

    def run(self) -> None:
        """Train until all steps are done, a signal arrives or early stopping triggers; then save.

        Raises UserError, after saving, for unusable data; all ranks detect it in the same step. On a GPU a step's
        results are read during the next step, so that the GPU never idles.
        """
        self._stop_request.training = True
        self._context.engine.train()  # models are loaded in evaluation mode, without dropout and recomputation
        try:
            with exclude_from_garbage_collection():
                while self.should_continue:
                    self.begin_step()
                    step = self.position.step + 1
                    self.advance(*self._context.recovery.attempt(step, self._saved_step, self._launch))
                    self.after_step()
        except UserError as error:
            self.save_and_raise(error)
        self.end()
        self._stop_request.agree_on_signal()

    @property
    def is_done(self) -> bool:
        return self.position.step >= self._total_steps or self.stopped_early

    @property
    def should_continue(self) -> bool:
        return not self.is_done and not self._stop

    def after_step(self) -> None:
        if self._context.stragglers is not None:
            self._context.stragglers.compare(self.position.step)
        self._evaluate_if_due()
        for hook in self._hooks:
            hook.between_steps(self.position.step, self._pause)
        steps = self._training.save_steps
        if self._save_requested or (steps and self.position.step % steps == 0):
            self._save()

    def end(self) -> None:
        """Wait for the last step, finish the hooks, and save."""
        self._finish_step()
        for hook in self._hooks:
            hook.finish()
        self._save(at_the_end=True)

    def save_and_raise(self, error: UserError) -> NoReturn:
        # If one rank runs out of memory, the other ranks are still inside the step and cannot save.
        if error.exit_code != UserError.exit_code or not self.position.step:
            raise error
        self._finish_step()
        self._save(at_the_end=True)
        raise UserError(
            f"{error}; training stopped after step {self.position.step}, which is saved; resume it with "
            "training.resume_from_checkpoint=latest"
        ) from error

    def begin_step(self) -> None:
        if self._previous is None:
            self._started = time.perf_counter()
        PROGRESS.begin_step(self.position.step + 1)
        for hook in self._hooks:
            hook.before_step(self.position.step + 1)

    def advance(self, launched: StepInFlight, consumed: int) -> None:
        """Advance the position past a launched step that used `consumed` samples across all ranks."""
        context, position = self._context, self.position
        for hook in self._hooks:
            hook.after_launch(position.step + 1)
        position.step += 1
        position.offset += consumed
        if context.batches.samples_per_epoch and position.offset >= context.batches.samples_per_epoch:
            position.epoch, position.offset = position.epoch + 1, 0
        metrics = {"train/learning_rate": float(context.schedule.get_last_lr()[0])}
        metrics["perf/graphed"] = context.loss.pop_replayed_fraction() if isinstance(context.loss, GraphedLoss) else 0.0
        self._in_flight = position.step, launched, metrics
        if not launched.on_device:
            self._finish_step()

    def _launch(self) -> tuple[StepInFlight, int]:
        context, position = self._context, self.position
        batches, consumed = self.fetch()
        launched = train_step(
            context,
            batches,
            step=position.step + 1,
            max_grad_norm=self._training.max_grad_norm,
            stop=bool(self._stop_request),
            save=self.wants_save(),
            before_update=self.before_update,
        )
        return launched, consumed

    def fetch(self) -> tuple[Sequence[Any], int]:
        """Return this rank's micro-batches for the next step, and the number of samples used across all ranks."""
        context, position = self._context, self.position
        with phase("data"), context.time_local_work(on_device=False):
            batches, consumed = context.batches.build_step_batches(position.epoch, position.offset)
        for hook in self._hooks:
            hook.on_batches(position.step + 1, batches)
        return batches, consumed

    def before_update(self) -> None:
        """Finish the previous step, and make the device wait for copies of tensors that the update changes."""
        self._context.recovery.is_updating = True
        self._finish_step()
        if self._checkpoints is not None:
            self._checkpoints.copies.make_updates_wait()

    def wants_save(self) -> bool:
        """Return whether this is rank 0 and `save_minutes` have passed. The step's result informs other ranks."""
        minutes = self._training.save_minutes
        return self._context.ranks.is_main and bool(minutes) and time.monotonic() - self._saved_time > 60.0 * minutes

    def _finish_step(self) -> None:
        """Wait for the step in flight, if there is one, and report it. Must be called before the next update."""
        if self._in_flight is None:
            return
        (step, launched, metrics), self._in_flight = self._in_flight, None
        position, result = self.position, launched.result()
        self.latest = result
        self._check_finite(step, result)
        if result.applied:
            self._context.schedule.step()
        position.tokens += result.tokens
        position.target_tokens += result.target_tokens
        self._stop = result.stop
        self._save_requested = self._save_requested or result.save
        previous = self._previous
        seconds = time.perf_counter() - self._started if previous is None else launched.seconds_since(previous)
        self._previous = launched
        self._report(step, result, metrics, seconds)

    def _pause(self) -> None:
        """Wait for the step in flight, and exclude the time until the next step from the next step's duration."""
        self._finish_step()
        self._previous = None

    def _check_finite(self, step: int, result: StepResult) -> None:
        """Raise FloatingPointError if a non-finite loss or gradient must stop the run; the step changed no weights."""
        position = self.position
        position.nonfinite_in_a_row = 0 if result.applied else position.nonfinite_in_a_row + 1
        if result.applied and math.isfinite(result.loss_sum):
            return
        position.nonfinite_steps += 1
        # fp16 finds its loss scale by trial, skipping a few steps at the start.
        searching = self._context.engine.fp16_enabled() and not result.applied
        patience = MAX_CONSECUTIVE_NONFINITE * 2 if searching else MAX_CONSECUTIVE_NONFINITE
        if (self._training.on_nonfinite == "skip" or searching) and position.nonfinite_in_a_row <= patience:
            return
        PROGRESS.attribute_failures_to(step)
        if result.nonfinite_ranks and not result.is_local_nonfinite:
            rank = result.nonfinite_rank
            ranks = f"{result.nonfinite_ranks} other ranks" if rank is None else f"rank {rank}"
            raise RemoteNonfiniteError(f"step {step}: {ranks} had a non-finite loss; no weights were updated")
        raise FloatingPointError(
            f"step {step}: the loss or a gradient is not finite; no weights were updated. Lower "
            "training.learning_rate, set training.precision: bf16 or training.on_nonfinite: skip, or check data with "
            "`zerolora inspect`"
        )

    def _report(self, step: int, result: StepResult, metrics: dict[str, float], seconds: float) -> None:
        context, position, units = self._context, self.position, self._batch_units
        is_logged = step % self._training.logging_steps == 0 or step == self._total_steps
        finished = FinishedStep(step, result.loss, result.grad_norm, seconds, is_logged)
        # All ranks must call the hooks, since some of them sum over ranks.
        measured = [hook.after_step(finished) for hook in self._hooks]
        measured += [context.loss.pop_metrics()] if is_logged else []
        if self._reporter is None:
            return
        values = {
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            "train/nonfinite_steps": float(position.nonfinite_steps),
            "perf/step_ms": seconds * 1e3,
            f"perf/{units[0]}_per_second": result.tokens / seconds,
            f"perf/{units[0]}_per_second_per_gpu": result.tokens / seconds / context.ranks.world_size,
            "memory/peak_gib": read_peak_memory_gib(),
        } | metrics
        if samples := context.batches.samples_per_epoch:
            values["train/epoch"] = position.epoch + position.offset / samples
        counts = (position.tokens, position.target_tokens)
        values |= {f"train/{name}": float(count) for name, count in zip(units, counts, strict=False)}
        if context.scu_controller is not None:
            values |= context.scu_controller.get_metrics()
        for metrics_of_hook in measured:
            values |= metrics_of_hook
        if self._save_s:
            values["perf/save_ms"], self._save_s = self._save_s * 1e3, 0.0
        self._reporter.display.update(step, values)
        if is_logged:
            self._reporter.log(step, values)

    def _evaluate_if_due(self) -> None:
        training, position = self._training, self.position
        if self._evaluate is None or not training.eval_steps:
            return
        is_due = position.step % training.eval_steps == 0
        # The final weights may be better than the best so far.
        if not is_due and not (training.best_checkpoint and position.step == self._total_steps):
            return
        self._pause()
        compared, values = self._evaluate()
        position.last_evaluation, position.evaluated_at = values.get("eval/loss"), position.step
        if self._reporter is not None:
            self._reporter.log(position.step, values)
        if compared < position.best_loss - training.early_stopping_threshold:
            position.best_loss, position.best_step, position.worse_in_a_row = compared, position.step, 0
            if training.best_checkpoint:
                self._save()
        else:
            position.worse_in_a_row += is_due
            patience = training.early_stopping
            self.stopped_early = patience is not None and position.worse_in_a_row >= patience

    def _save(self, *, at_the_end: bool = False) -> None:
        """Save a checkpoint, unless the current step is already saved.

        With `at_the_end`, wait until it is written, and raise SaveError if that fails. Otherwise a save that fails,
        such as on a full disk, does not stop training. Copies to the host are launched before the step's result is
        read, so that the device does not idle.
        """
        self._save_requested = False
        if self._checkpoints is None:
            return
        if self._saved_step != self.position.step:
            self._start_save(self._checkpoints, at_the_end=at_the_end)
        if at_the_end:
            self._checkpoints.finish_save()

    def _start_save(self, checkpoints: CheckpointManager, *, at_the_end: bool) -> None:
        context, started = self._context, time.perf_counter()
        checkpoints.capture(context.engine)
        waiting = time.perf_counter()
        self._finish_step()
        self._previous, started = None, started + time.perf_counter() - waiting
        try:
            checkpoints.save(context.engine, self.position, context.schedule, context.batches, context.scu_controller)
        except SaveError:
            if at_the_end:
                raise
        else:
            self._saved_step = self.position.step
        self._save_requested, self._saved_time, self._save_s = False, time.monotonic(), time.perf_counter() - started


@contextmanager
def exclude_from_garbage_collection() -> Iterator[None]:
    """Exclude all existing objects from garbage collection within the block.

    Otherwise one rank would spend tenths of a second in some steps on traversing half a million objects, while all
    other ranks wait.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
