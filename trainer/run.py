"""A training run on one rank: join, load the model, start the engine, restore, train, save."""

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from trainer.checkpoint.checkpoint import Position
from trainer.checkpoint.checkpoint_manager import CheckpointManager
from trainer.checkpoint.run_folder import RunFolder
from trainer.config import LoadedConfig, compute_collective_timeout
from trainer.config.errors import format_count
from trainer.contract.folder_lock import FolderLock
from trainer.data.prepared import PreparedRun, count_skipped_records
from trainer.evaluation import Evaluation
from trainer.loop import Loop
from trainer.monitor.console import Output
from trainer.parallel.engine.optimizer import build_schedule
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks, set_process_group_timeouts
from trainer.parallel.ranks.progress import phase
from trainer.parallel.ranks.signals import StopRequest
from trainer.scu.controller import ScuController
from trainer.scu.setup import build_scu_controller, list_target_warnings, scale_adapter_to_target
from trainer.setup.build import Builder
from trainer.setup.joining import join_run
from trainer.step import StepContext
from trainer.tasks.task import BatchSource, StepLoss, Task

# How long a failed run may take to finish writing its newest checkpoint; the launcher waits 8 s.
FINISH_SAVE_S = 5.0
LONG_LOAD_S = 3.0


class Run:
    """A training run on one rank; attributes without a default are listed in the order in which they are set."""

    has_checkpoints = True
    build_evaluation: Callable[..., Evaluation] = Evaluation

    # join (trainer/setup/joining.py)
    device: torch.device
    precision: str
    task: Task
    total_steps: int
    builder: Builder
    checkpoints: CheckpointManager
    folder: RunFolder
    # load, start engine
    loss: StepLoss
    # restore, steer
    batches: BatchSource
    schedule: Any
    scu_controller: ScuController | None
    # train, save
    position: Position
    loop: Loop
    evaluation: Evaluation
    resident: int
    """GPU memory in bytes that is allocated after the engine has started, and stays allocated."""
    peak: int
    """Peak GPU memory in bytes; the maximum across ranks."""

    def __init__(
        self,
        loaded: LoadedConfig,
        prepared: PreparedRun,
        ranks: Ranks,
        console: Console,
        stop: StopRequest,
        lock: FolderLock | None = None,
        *,
        verbose: bool = True,
    ) -> None:
        """Prepare the run; on rank 0, `lock` is the lock on the run's folder.

        Unless `verbose` is set, the console shows only the most important lines before the first step.
        """
        self.config, self.notes, self.lock = loaded.config.fit_max_length(prepared.context_length), loaded.notes, lock
        self.prepared, self.ranks, self.console, self.stop = prepared, ranks, console, stop
        self.log = Output(console, is_main=ranks.is_main, verbose=verbose)
        self.scu_controller = None

    def train(self) -> Position:
        """Join the other ranks, train, and save; a collective call."""
        self._join()
        self.find_checkpoint()
        engine = self._start_engine(self._build_model())
        self.begin(engine)
        try:
            self.loop.run()
        except FloatingPointError:
            if self.position.nonfinite_steps >= self.position.step:
                self.task.check_base()
            raise
        self.evaluate_and_save(stopped=bool(self.stop))
        self.stop.saved = True
        engine.destroy()
        self.finish()
        return self.position

    def find_checkpoint(self) -> None:
        """Open the run's folder, and agree with the other ranks on the checkpoint to start from."""
        self.folder = RunFolder(self.config, self.task, self.ranks, self.console, self.log, self.lock)
        self.checkpoints = CheckpointManager(
            self.config, self.prepared, self.ranks, self.precision, self.log, self.folder
        )
        self.checkpoints.agree_on_checkpoint()

    def begin(self, engine: Engine) -> None:
        """Restore the checkpoint, write the run's record, evaluate, and build the loop."""
        self._engine, model = engine, engine.module
        with phase("restore"):
            self.batches = self.task.build_batches()
            self.schedule = build_schedule(engine.basic_optimizer, self.config.training, self.total_steps)
            restored = self.checkpoints.restore(engine, self.total_steps, self.schedule, self.batches)
        self.position, restored_scu = restored
        position = self.position
        best, has_held_out = self.config.training.monitored_metric, self.prepared.data.evaluation is not None
        measured = {"has_held_out": has_held_out, "has_scores": self.config.evaluation.has_scores}
        self.evaluation = self.build_evaluation(self.task, engine, self.loss, self.log, best_metric=best, **measured)
        self.scu_controller = self._build_scu_controller(engine, position, restored_scu)
        prompt_text, checkpoint = self.prepared.data.stats.prompt_text, self.checkpoints.checkpoint
        self.folder.open(model, position, self.total_steps, self.device, self.precision, prompt_text, checkpoint)
        self._loss_before = self._evaluate_and_sample(position, "before") if position.step == 0 else None
        self.loop = self._build_loop(engine, position)

    def evaluate_and_save(self, *, stopped: bool) -> None:
        """Evaluate and save the result, unless a signal stopped the loop (`stopped`, the same on all ranks)."""
        engine, position, self._stopped = self._engine, self.position, stopped
        self.log.is_starting = False  # also for a run without remaining steps
        after = None
        if not stopped:
            if self.loop.stopped_early:
                self._report_early_stop(position)
            kept_step = self.checkpoints.restore_best(engine, position)
            if (factor := scale_adapter_to_target(self.scu_controller, engine.module, self.log)) != 1.0:
                position.evaluated_at = -1  # the last evaluation measured the unscaled adapter
            after = self._evaluate_and_sample(position, "after")
            if kept_step is not None and after is not None:
                self.folder.log(position.step, {"eval/kept_step": float(kept_step), "eval/kept_loss": after})
            self._save_result(engine, factor)
        if self.scu_controller is not None and self.ranks.is_main:
            self.scu_controller.apply_pending_measurement()
            self.folder.save_scu_records(self.scu_controller)
        self.peak = self.memory.measure_peak()
        self._loss_after = after

    def _join(self) -> None:
        joined = join_run(self.config, self.notes, self.prepared, self.ranks, self.lock, self.log)
        self.precision, self.memory, self.task, self.total_steps = joined
        self.device, self.config = self.ranks.device(), self.memory.config
        decisions = self.memory.decisions
        self.builder = Builder(self.config, decisions, self.task, self.ranks, self.device, self.precision)

    @phase("load")
    def _build_model(self) -> Any:
        message = f"loading the model {escape(self.config.base_model)}"
        timer = threading.Timer(LONG_LOAD_S, self.log.print_always, [message])
        timer.daemon = True
        timer.start()
        try:
            model, (summary, *lines) = self.builder.build_model()
        finally:
            timer.cancel()
        self.log.print_always(summary)
        for line in (*lines, *self.prepared.notes, *self.prepared.data.stats.format_summary()):
            (self.log.print_always if str(line).startswith("train: ") else self.log)(line)
        return model

    @phase("start engine")
    def _start_engine(self, model: Any) -> Engine:
        engine, self.loss = self.builder.start_engine(model)
        self.resident = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        return engine

    @phase("steer")
    def _build_scu_controller(
        self, engine: Engine, position: Position, restored: dict[str, Any] | None
    ) -> ScuController | None:
        if not self.config.scu.enabled:
            return None
        scu_controller, warnings = build_scu_controller(
            self.config, self.prepared, self.ranks, engine, self.loss,
            flat=self.task.flat_packs, total_steps=self.total_steps, step=position.step,
            restored=restored, run_dir=self.folder.path, log=self.log,
        )  # fmt: skip
        batches, _ = self.batches.build_step_batches(position.epoch, position.offset)
        bits = self.evaluation.compute_mean_loss(batches) / math.log(2)
        warnings += list_target_warnings(
            scu_controller, bits, self.schedule, self.config, self.total_steps, position.step
        )
        for warning in warnings:
            self.log(f"[yellow]warning:[/yellow] {escape(warning)}")
        return scu_controller

    def _build_loop(self, engine: Engine, position: Position) -> Loop:
        config, steps = self.config, self.total_steps
        loss, stragglers = self.builder.build_training_loss_and_watch(self.loss, engine, self.log)
        set_process_group_timeouts(compute_collective_timeout(config.training))
        count, sample = self._count_skipped, partial(self.evaluation.sample, folder=self.folder)
        hooks = self.builder.build_hooks(engine, self.scu_controller, position, steps, count, sample, self.log)
        recovery = self.memory.build_recovery(self.ranks.world_size)
        return Loop(
            StepContext(
                engine, loss, self.batches, self.ranks, self.schedule, recovery, self.scu_controller, stragglers
            ),
            hooks,
            config.training,
            position,
            steps,
            stop=self.stop,
            reporter=self.folder.metrics,
            evaluate=self.evaluation.measure if self.evaluation.is_defined else None,
            checkpoints=self.checkpoints if self.has_checkpoints else None,
            batch_units=self.task.batch_units,
        )

    def _evaluate_and_sample(self, position: Position, when: str) -> float | None:
        loss = position.last_evaluation if position.evaluated_at == position.step else None
        is_done = position.evaluated_at == position.step and (loss is not None or not self.evaluation.has_data)
        if self.evaluation.is_defined and not is_done:
            _, values = self.evaluation.measure(include_base=when == "before")
            loss = values.get("eval/loss")
            self.folder.log(position.step, values)
        self.evaluation.sample(when, position.step, self.folder)
        return loss

    def _report_early_stop(self, position: Position) -> None:
        patience, best = self.config.training.early_stopping, self.config.training.best_metric
        better, optimum = ("lower held-out loss", "lowest") if best == "loss" else (f"better {best}", "best")
        self.log(
            f"stopped early at step {position.step} of {self.total_steps}: no {better} in "
            f"{format_count(patience or 0, 'evaluation')} (training.early_stopping={patience}); the {optimum} is "
            f"{self.evaluation.sign * position.best_loss:.4f} at step {position.best_step}"
        )
        self.folder.log(position.step, {"train/stopped_early_of": float(self.total_steps)})

    def _save_result(self, engine: Engine, factor: float) -> None:
        self.checkpoints.save_result(engine, self.schedule, factor)

    @phase("report")
    def finish(self) -> None:
        """Close the metrics and write the report."""
        position, before, after = self.position, self._loss_before, self._loss_after
        if self.folder.metrics is None:
            return
        self.folder.metrics.close()
        self.folder.check_lock()
        self.folder.write_times()
        with self.folder.tolerate_full_disk("the measured memory"):
            self.log(self.memory.record(self.folder.path, self.peak, self.device))
        for source, count in self._count_skipped().items():
            self.log(f"{source}: skipped {format_count(count, 'record')} (dataset.on_bad_record=skip)")
        self.log.repeat_warnings()
        if self._stopped:
            self.folder.print_resume_command(position.step)
        else:
            self.folder.write_report(before, after)
        self.checkpoints.upload_result()

    def _count_skipped(self) -> dict[str, int]:
        skips = self.config.dataset.on_bad_record == "skip"
        return count_skipped_records(self.prepared, self.batches) if skips else {}

    def close(self) -> None:
        """Close the metrics of a failed run, after waiting briefly for a checkpoint that is being written."""
        if hasattr(self, "checkpoints"):
            self.checkpoints.wait_for_save(FINISH_SAVE_S)
            if self.folder.metrics is not None:
                self.folder.metrics.close()
