"""Select, restore and write the checkpoints of a run.

State is copied to host memory during the step and written by a thread on every rank (trainer/checkpoint/background.py).
`capture` gathers partitioned weights and queues the copies while the device is still computing the step. `save` starts
writing once the step's loss is known. `finish_save`, called before the next copy and at the end, waits for the writers
and exchanges the outcome between ranks.
"""

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from trainer.checkpoint.background import TEMP_PREFIX, BackgroundSave, SaveError, exchange_outcomes
from trainer.checkpoint.checkpoint import Position, RankState, restore_checkpoint
from trainer.checkpoint.checkpoint_files import (
    describe_damage,
    list_later_checkpoints,
    list_surplus_checkpoints,
    publish,
)
from trainer.checkpoint.host_copies import HostCopies
from trainer.checkpoint.identity import build_identity, describe_finished_run, plan_resumption
from trainer.checkpoint.run_folder import RunFolder
from trainer.checkpoint.weights import gather_weights
from trainer.config import RunConfig, UserError
from trainer.contract.object_store import upload_run
from trainer.contract.output_files import collect_disk_errors
from trainer.contract.whole_files import sync
from trainer.data.batches import StreamBatches
from trainer.data.prepared import PreparedRun
from trainer.monitor.console import Output
from trainer.parallel.engine.optimizer import has_positive_rate, restore_schedule, use_averaged_weights
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks, run_on_main
from trainer.parallel.ranks.progress import phase
from trainer.scu.controller import ScuController
from trainer.tasks.task import BatchSource

REQUANTIZED_MOMENTS = (
    "the 8-bit moments are partitioned differently than in the checkpoint and were requantized, so the resumed "
    "run is not bitwise identical"
)


class CheckpointManager:
    """Manages the checkpoints of a run; every rank has an instance."""

    def __init__(
        self, config: RunConfig, prepared: PreparedRun, ranks: Ranks, precision: str, log: Output, folder: RunFolder
    ) -> None:
        self._config, self._prepared, self._ranks, self._precision, self._log = config, prepared, ranks, precision, log
        self._run_dir, self._folder = Path(config.output_dir), folder
        self.checkpoint: Path | None = None
        self._identity: dict[str, Any] | None = None
        self._first_step = 0
        self._abandoned: list[Path] = []
        self._renamed: list[Path] = []
        self.copies = HostCopies()
        self._copied: tuple[RankState, dict[str, torch.Tensor]] | None = None
        self._current: BackgroundSave | None = None
        self._upload_problem = ""

    @phase("restore")
    def agree_on_checkpoint(self) -> None:
        """Choose the checkpoint on all ranks, before weights are loaded. Raises UserError if it cannot be used."""
        config, ranks = self._config, self._ranks
        plan = partial(plan_resumption, world_size=ranks.world_size, precision=self._precision)
        resumption = run_on_main(ranks, lambda: plan(config, self._prepared))
        self.checkpoint = resumption.checkpoint
        self._abandoned = [] if self.checkpoint else list_later_checkpoints(self._run_dir, 0)
        for warning in resumption.warnings:
            self._log(f"[yellow]warning:[/yellow] {escape(warning)}")
        for note in resumption.notes:
            self._log.print_always(f"note: {escape(note)}")

    def restore(
        self, engine: Engine, total_steps: int, schedule: Any, batches: BatchSource
    ) -> tuple[Position, dict[str, Any] | None]:
        """Restore the engine, schedule and batches if a checkpoint was chosen; return the position and SCU state."""
        training = self._config.training
        if self.checkpoint is None:
            return Position(best_metric=training.monitored_metric), None
        state = restore_checkpoint(self.checkpoint, engine, self._ranks)
        position = Position.from_dict(state)
        self._abandoned, self._first_step = list_later_checkpoints(self._run_dir, position.step), position.step
        self._log.print_always(f"resumed from {self.checkpoint} at step {position.step}")
        if state["requantized"]:
            self._log("note: " + REQUANTIZED_MOMENTS)
        if training.max_steps is None and position.step >= total_steps:
            self._log.print_always(f"note: {describe_finished_run(position.step, total_steps)}")
        best, metric = position.best_step, training.monitored_metric
        reason = f"training.best_metric is now {metric}" if position.best_metric != metric else ""
        if training.best_checkpoint and best and not self._get_checkpoint_path(best).exists():
            reason = f"the best checkpoint so far (step {best}) is missing"
        if best and reason:
            self._log(f"note: {reason}; the search for the best checkpoint starts over")
            position.best_loss, position.best_step, position.worse_in_a_row = math.inf, 0, 0
        position.best_metric = metric
        restore_schedule(schedule, int(state["schedule_steps"]))
        if isinstance(batches, StreamBatches):
            batches.load_state_dict(state.get("stream", {}))
        return position, state.get("scu")

    def save_result(self, engine: Engine, schedule: Any, factor: float) -> None:
        """Write the final weights with the adapter's update scaled by `factor`; a collective call."""
        require_nonzero_b, identity = has_positive_rate(schedule), self._get_identity()
        self._folder.save_result(engine, require_nonzero_b=require_nonzero_b, factor=factor, identity=identity)

    def _get_identity(self) -> dict[str, Any] | None:
        """Return this run's identity on rank 0; None on the other ranks."""
        if self._identity is None and self._ranks.is_main:
            identity = build_identity(self._config, self._prepared, self._ranks.world_size, self._precision)
            self._identity = identity.model_dump()
        return self._identity

    @phase("save")
    def capture(self, engine: Engine) -> None:
        """Queue copies of the engine's state and weights to host memory after the current step; a collective call."""
        with suppress(SaveError):  # already reported; continue with this save
            self.finish_save()
        state = RankState.capture(engine, self._ranks, self.copies)
        with phase("gather"), use_averaged_weights(engine):
            weights = gather_weights(engine.module, only_trained=self._config.adapter != "none", copy=self.copies.copy)
        self.copies.record_event()
        self._copied = state, weights

    @phase("save")
    def save(
        self,
        engine: Engine,
        position: Position,
        schedule: Any,
        batches: BatchSource,
        scu_controller: ScuController | None,
    ) -> None:
        """Start writing the state queued by `capture`, and all other state, in the background; a collective call.

        Raises SaveError on every rank, after a warning, if the folder cannot be created.
        """
        assert self._copied is not None, "nothing was copied"
        (rank_state, weights), self._copied = self._copied, None
        state = position.to_dict() | {"schedule_steps": schedule.last_epoch}
        if isinstance(batches, StreamBatches):
            state["stream"] = batches.state_dict()
        if scu_controller is not None:
            state["scu"] = scu_controller.state_dict()
            self._folder.save_scu_records(scu_controller)
        folder = self._run_dir / f"{TEMP_PREFIX}checkpoint-{position.step}"
        if self._ranks.is_main:
            self._folder.restore_record()
        require_nonzero_b = has_positive_rate(schedule)
        write_weights = self._folder.build_weights_writer(engine, weights, require_nonzero_b=require_nonzero_b)
        rank_state = rank_state.fill_state(state, engine, self._ranks)

        def write(folder: Path) -> None:
            self.copies.wait()
            if self._ranks.is_main:
                rank_state.state["run"] = self._get_identity()
                write_weights(folder)
            for file in rank_state.write(folder):
                sync(file)

        protect = (position.best_step, position.step) if self._config.training.best_checkpoint else (position.step,)
        failures: list[str] = []
        with collect_disk_errors(failures, self._run_dir):
            if self._ranks.is_main:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
        with self._warn_on_failure():
            exchange_outcomes(failures, None, folder, self._ranks)
        self._current = BackgroundSave(folder, write, partial(self._publish, protect), self._ranks)

    def _publish(self, protect: tuple[int, ...], folder: Path) -> None:
        """Publish a checkpoint and delete surplus ones, except at the steps in `protect`; runs in the save thread.

        Renames an earlier run's checkpoints that are newer than the step from which this run resumed.
        """
        self._folder.check_lock()
        self._renamed = publish(folder, self._run_dir / folder.name.removeprefix(TEMP_PREFIX), self._abandoned)
        limit = self._config.training.save_total_limit
        for checkpoint in list(list_surplus_checkpoints(self._run_dir, limit, protect)):
            shutil.rmtree(checkpoint)
        self._upload()

    def _upload(self) -> str | None:
        """Upload a run on an object store, and return its URL. The next save retries a failed upload."""
        try:
            self._upload_problem = ""
            return upload_run(self._run_dir)
        except UserError as error:
            self._upload_problem = str(error)
            return None

    @phase("save")
    def upload_result(self) -> None:
        """Upload the finished run if it is on an object store. Raises SaveError on rank 0 if the upload fails."""
        if self._ranks.is_main and (address := self._upload()):
            self._log(f"uploaded     {escape(address)}")
        if self._upload_problem:
            raise SaveError(f"{self._upload_problem}; the result is in {self._run_dir}")

    @phase("save")
    def finish_save(self) -> None:
        """Wait for the current save; a collective call. Warns and raises SaveError on all ranks if any rank failed."""
        save, self._current = self._current, None
        if save is None:
            return
        with self._warn_on_failure():
            save.finish()
        self._abandoned = []
        if self._upload_problem:
            self._log(f"[yellow]warning:[/yellow] not uploaded: {escape(self._upload_problem)}; training continues")
            self._upload_problem = ""
        if self._renamed:
            names = ", ".join(path.name for path in self._renamed)
            self._log(f"checkpoints after step {self._first_step} belong to the earlier run and were renamed: {names}")
            self._renamed = []

    def wait_for_save(self, seconds: float) -> None:
        """Wait up to `seconds` for the current save on this rank only; for use after the run has failed."""
        if self._current is not None:
            self._current.thread.join(seconds)

    @contextmanager
    def _warn_on_failure(self) -> Iterator[None]:
        try:
            yield
        except SaveError as error:
            self._log(f"[yellow]warning:[/yellow] {escape(str(error))}")
            raise

    def restore_best(self, engine: Engine, position: Position) -> int | None:
        """Restore the weights with the best `best_metric` and return their step.

        Returns None and keeps the last weights if `best_checkpoint` is not set, if the last weights are the best or
        no best step is known, or if the best checkpoint is damaged.
        """
        if not self._config.training.best_checkpoint or position.best_step in (0, position.step):
            return None
        best = self._get_checkpoint_path(position.best_step)
        if problem := run_on_main(self._ranks, lambda: describe_damage(best)):
            self._log(f"[yellow]warning:[/yellow] {escape(f'{best.name}: {problem}')}; keeping the last weights")
            return None
        restore_checkpoint(best, engine, self._ranks)
        metric = position.best_metric
        is_known = metric == "loss" and not self._config.evaluation.has_scores
        position.last_evaluation, position.evaluated_at = position.best_loss, position.step if is_known else -1
        score = "lowest held-out loss" if metric == "loss" else f"best {metric}"
        self._log(f"keeping the weights of step {position.best_step}, which have the {score}")
        return position.best_step

    def _get_checkpoint_path(self, step: int) -> Path:
        """Return the path of a step's checkpoint, which may be in the folder from which this run resumed."""
        path = self._run_dir / f"checkpoint-{step}"
        return path if self.checkpoint is None or path.exists() else self.checkpoint.parent / path.name
