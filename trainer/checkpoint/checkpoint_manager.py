"""Resume a run, save its checkpoints, and set aside those of an earlier run in the same folder."""

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from trainer.checkpoint.background import CheckpointSaver, PublishOptions, SaveFailed, WriteWeights
from trainer.checkpoint.checkpoint import Position, find_damage_collectively, restore_checkpoint
from trainer.checkpoint.checkpoint_files import later_checkpoints
from trainer.checkpoint.host_copies import HostCopies
from trainer.checkpoint.identity import run_identity
from trainer.checkpoint.resume_comparison import agree_on_resumption, describe_finished
from trainer.config import RunConfig, UserError
from trainer.data.prepared import Prepared
from trainer.monitor.console import Output
from trainer.monitor.metrics import archive_previous_attempt
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks
from trainer.parallel.ranks.progress import phase

REQUANTIZED_MOMENTS = (
    "the 8-bit moments are split into other blocks than in the checkpoint and were quantized again: the run continues "
    "almost, but not exactly, as it would have"
)


class CheckpointManager:
    """The checkpoint that all ranks agree to resume from, and those written afterwards; every rank has a manager."""

    @phase("restore")
    def __init__(
        self,
        config: RunConfig,
        prepared: Prepared,
        ranks: Ranks,
        device: torch.device,
        precision: str,
        say: Output,
    ) -> None:
        """Agree on the checkpoint before weights are loaded; raises UserError if it is damaged or of another run."""
        self._config, self._prepared, self._ranks, self._precision, self._say = config, prepared, ranks, precision, say
        self._run_dir = Path(config.output_dir)
        self._identity: dict[str, Any] | None = None
        self._saved, self._begun_at = False, 0
        self._saves = CheckpointSaver(self._run_dir, ranks)
        resumption = agree_on_resumption(config, prepared, ranks, precision)
        self.checkpoint = resumption.checkpoint
        self._later = [] if self.checkpoint else later_checkpoints(self._run_dir, 0)
        for warning in resumption.warnings:
            say(f"[yellow]warning:[/yellow] {escape(warning)}")
        for note in resumption.notes:
            say(f"note: {escape(note)}")

    def restore(self, engine: Engine, total_steps: int) -> tuple[Position, dict[str, Any]]:
        """Load the checkpoint, if any, into the engine; return its position and `state.json`."""
        training = self._config.training
        if self.checkpoint is None:
            return Position(best_metric=training.compared_metric), {}
        state = restore_checkpoint(self.checkpoint, engine, self._ranks)
        position = Position.from_dict(state)
        self._later, self._begun_at = later_checkpoints(self._run_dir, position.step), position.step
        self._say.show(f"resumed from {self.checkpoint} at step {position.step}")
        if state["requantized"]:
            self._say("note: " + REQUANTIZED_MOMENTS)
        if training.max_steps is None and position.step >= total_steps:
            self._say(f"note: {describe_finished(position.step, total_steps)}")
        best, now = position.best_step, training.compared_metric
        why = f"training.best_metric is now {now}" if position.best_metric != now else ""
        if training.best_checkpoint and best and not self._checkpoint_path(best).exists():
            why = f"the best checkpoint so far (step {best}) is missing"
        if best and why:
            self._say(f"note: {why}; the search for the best starts over")
            position.best_loss, position.best_step, position.worse_in_a_row = math.inf, 0, 0
        position.best_metric = now
        return position, state

    def prepare_saves(self, engine: Engine, also: Callable[[], object]) -> None:
        """Prepare the first save and call `also` in a thread while the first step runs."""

        def prepare() -> None:
            self.identity()
            also()

        self._saves.prepare(engine, prepare)

    def identity(self) -> dict[str, Any] | None:
        """Return this run's identity on rank 0; None on the other ranks."""
        if self._identity is None and self._ranks.is_main:
            found = run_identity(self._config, self._prepared, self._ranks.world_size, self._precision)
            self._identity = found.model_dump()
        return self._identity

    def copy(self, engine: Engine, weights: Callable[[HostCopies], object]) -> None:
        """Queue copies of a checkpoint's tensors behind the current step on the device; a collective call."""
        with suppress(SaveFailed):  # the previous save: its failure was reported, and the next one follows
            self.settle()
        self._saves.copy(engine, weights)

    def make_updates_wait(self) -> None:
        """Make the next update on the device wait for the copies."""
        self._saves.make_updates_wait()

    def save(
        self,
        engine: Engine,
        position: Position,
        more: dict[str, Any],
        write_weights: WriteWeights,
        before_publishing: Callable[[], None],
    ) -> None:
        """Start writing what was copied; a collective call. Raises SaveFailed, after a warning."""
        training = self._config.training
        order = PublishOptions(
            keep=training.save_total_limit,
            protect=(position.best_step,) if training.best_checkpoint else (),
            later=self._later,
            before_publishing=before_publishing,
            after_publishing=self._close_earlier_run,
        )
        with self._warn_on_failure():
            state = position.to_dict() | more | {"run": self.identity()}
            self._saves.begin(engine, state, write_weights, order)

    @phase("save")
    def settle(self) -> None:
        """Wait until the current save is complete; a collective call. Raises SaveFailed, after a warning."""
        with self._warn_on_failure():
            aside = self._saves.finish()
        if aside is None:
            return
        self._later = []
        if aside:
            names = ", ".join(path.name for path in aside)
            self._say(f"checkpoints after step {self._begun_at} belong to the earlier run: kept as {names}")

    def _close_earlier_run(self, aside: list[Path]) -> None:
        """Drop or set aside the earlier run's metrics once this run has a checkpoint."""
        if not self._saved:
            archive_previous_attempt(self._run_dir, keep=bool(aside))
        self._saved = True

    def wait_for_save(self, seconds: float) -> None:
        """Wait for a save on this rank alone, after the run has failed."""
        self._saves.wait(seconds)

    @contextmanager
    def _warn_on_failure(self) -> Iterator[None]:
        try:
            yield
        except SaveFailed as error:
            self._say(f"[yellow]warning:[/yellow] {escape(str(error))}")
            raise

    def copy_missing_folder(self, name: str) -> None:
        """Copy a folder of the resumed run into this run's output_dir, unless it is already there."""
        source, target = (self.checkpoint or self._run_dir).parent / name, self._run_dir / name
        if target.is_dir():
            return
        if not source.is_dir():
            raise UserError(f"{source}: missing, and the run cannot continue without it; restore it")
        if self._ranks.is_main:
            shutil.copytree(source, target)

    def restore_best(self, engine: Engine, position: Position) -> int | None:
        """Restore the weights with the best `best_metric` if `best_checkpoint` is set; return their step.

        Returns None if the last weights are kept: they are the best, or the best checkpoint is damaged.
        """
        if not self._config.training.best_checkpoint or position.best_step in (0, position.step):
            return None
        best = self._checkpoint_path(position.best_step)
        if problem := find_damage_collectively(best, self._ranks):
            self._say(f"[yellow]warning:[/yellow] the last weights are kept: {escape(f'{best.name}: {problem}')}")
            return None
        restore_checkpoint(best, engine, self._ranks)
        metric = position.best_metric
        is_known = metric == "loss" and not self._config.evaluation.has_scores
        position.last_evaluation, position.evaluated_at = position.best_loss, position.step if is_known else -1
        named = "lowest held-out loss" if metric == "loss" else f"best {metric}"
        self._say(f"the weights of step {position.best_step} have the {named} and are kept")
        return position.best_step

    def _checkpoint_path(self, step: int) -> Path:
        """Return the checkpoint of a step, in this run's folder or that of the run it resumes."""
        own = self._run_dir / f"checkpoint-{step}"
        return own if self.checkpoint is None or own.exists() else self.checkpoint.parent / own.name
