"""The course of a run through its checkpoints: where it begins, how it saves, and what becomes of an earlier course."""

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from trainer.checkpoint.background import Order, SaveFailed, Saves, WriteWeights
from trainer.checkpoint.checkpoint import agreed_damage, restore_checkpoint
from trainer.checkpoint.checkpoint_files import later_checkpoints
from trainer.checkpoint.host_copies import HostCopies
from trainer.checkpoint.identity import run_identity
from trainer.checkpoint.position import Position
from trainer.checkpoint.resume_comparison import agree_on_resumption, nothing_left
from trainer.config import RunConfig, UserError
from trainer.data.prepared import Prepared
from trainer.monitor.metrics import archive_previous_attempt
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks
from trainer.parallel.ranks.progress import phase

ROUNDED_ANEW = (
    "the 8-bit moments are cut into other blocks here than in the checkpoint and were rounded again: the run goes on "
    "nearly, not exactly, as it would have"
)


class Course:
    """On every rank: the checkpoint that all agree to begin at, and those that are written from there on."""

    @phase("restore")
    def __init__(
        self,
        config: RunConfig,
        prepared: Prepared,
        ranks: Ranks,
        device: torch.device,
        precision: str,
        say: Callable[[str], None],
    ) -> None:
        """Before a weight is loaded. Raises UserError if the checkpoint is damaged or of another run."""
        self._config, self._prepared, self._ranks, self._precision, self._say = config, prepared, ranks, precision, say
        self._run_dir = Path(config.output_dir)
        self._identity: dict[str, Any] | None = None
        self._saved, self._begun_at = False, 0
        self._saves = Saves(self._run_dir, ranks)
        resumption = agree_on_resumption(config, prepared, ranks, device, precision)
        self.checkpoint = resumption.checkpoint
        self._later = [] if self.checkpoint else later_checkpoints(self._run_dir, 0)
        for warning in resumption.warnings:
            say(f"[yellow]warning:[/yellow] {escape(warning)}")
        for note in resumption.notes:
            say(f"note: {escape(note)}")

    def restore(self, engine: Engine, total_steps: int) -> tuple[Position, dict[str, Any]]:
        """The engine brought to the checkpoint, if there is one; the position there and `state.json`."""
        if self.checkpoint is None:
            return Position(), {}
        state = restore_checkpoint(self.checkpoint, engine, self._ranks)
        position = Position.from_dict(state)
        self._later, self._begun_at = later_checkpoints(self._run_dir, position.step), position.step
        self._say(f"resumed from {self.checkpoint} at step {position.step}")
        if state.get("rounded_anew"):
            self._say("note: " + ROUNDED_ANEW)
        training = self._config.training
        if training.max_steps is None and position.step >= total_steps:
            self._say(f"note: {nothing_left(position.step, total_steps)}")
        best = position.best_step
        if training.best_checkpoint and best and not self._checkpoint_of(best).exists():
            self._say(f"note: the best checkpoint so far, of step {best}, is gone; the best is searched for again")
            position.best_loss, position.best_step, position.worse_in_a_row = math.inf, 0, 0
        return position, state

    def prepare_saves(self, engine: Engine, also: Callable[[], object]) -> None:
        """Have a thread do what the first save needs, and `also`, while the first step runs."""

        def prepare() -> None:
            self.identity()
            also()

        self._saves.prepare(engine, prepare)

    def identity(self) -> dict[str, Any] | None:
        """Return what this run is known by; None on all ranks but the first."""
        if self._identity is None and self._ranks.is_main:
            found = run_identity(self._config, self._prepared, self._ranks.world_size, self._precision)
            self._identity = found.model_dump()
        return self._identity

    def copy(self, engine: Engine, weights: Callable[[HostCopies], object]) -> None:
        """Copy what a checkpoint holds, behind the step that the device is in; every rank must call it."""
        with suppress(SaveFailed):  # of the one before: the user knows, and another is about to be made
            self.settle()
        self._saves.copy(engine, weights)

    def hold_changes(self) -> None:
        """Before an update: have the device make the copies first."""
        self._saves.hold_changes()

    def save(
        self,
        engine: Engine,
        position: Position,
        more: dict[str, Any],
        write_weights: WriteWeights,
        before_publishing: Callable[[], None],
    ) -> None:
        """Let what was copied be written; every rank must call it. Raises SaveFailed after telling the user."""
        training = self._config.training
        order = Order(
            keep=training.save_total_limit,
            protect=(position.best_step,) if training.best_checkpoint else (),
            later=self._later,
            before_publishing=before_publishing,
            after_publishing=self._is_under_way,
        )
        with self._told():
            state = position.to_dict() | more | {"run": self.identity()}
            self._saves.begin(engine, state, write_weights, order)

    @phase("save")
    def settle(self) -> None:
        """Wait until the checkpoint that is being written is whole; every rank must call it.

        Raises SaveFailed, of which the user has been told, if it is not.
        """
        with self._told():
            aside = self._saves.finish()
        if aside is None:
            return
        self._later = []
        if aside:
            names = ", ".join(path.name for path in aside)
            self._say(f"checkpoints later than step {self._begun_at} belong to the earlier course: kept as {names}")

    def _is_under_way(self, aside: list[Path]) -> None:
        """This course now has a checkpoint of its own: however the run ends, its records are the valid ones."""
        if not self._saved:
            archive_previous_attempt(self._run_dir, keep=bool(aside))
        self._saved = True

    def wait_for_save(self, seconds: float) -> None:
        """On this rank alone, of a run that has failed."""
        self._saves.wait(seconds)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except SaveFailed as error:
            self._say(f"[yellow]warning:[/yellow] {escape(str(error))}")
            raise

    def bring(self, name: str) -> None:
        """A folder that the run needs and that lies beside the checkpoint, where this run has another output_dir."""
        source, target = (self.checkpoint or self._run_dir).parent / name, self._run_dir / name
        if target.is_dir():
            return
        if not source.is_dir():
            raise UserError(f"{source}: missing, and the run cannot go on without it; bring it back to where it was")
        if self._ranks.is_main:
            shutil.copytree(source, target)

    def return_to_best(self, engine: Engine, position: Position) -> int | None:
        """Restore the weights with the lowest held-out loss if `best_checkpoint` is set; return their step.

        None if the last weights stay: they are the best, or the best checkpoint is damaged.
        """
        if not self._config.training.best_checkpoint or position.best_step in (0, position.step):
            return None
        best = self._checkpoint_of(position.best_step)
        if problem := agreed_damage(best, self._ranks):
            self._say(f"[yellow]warning:[/yellow] the last weights are kept: {escape(f'{best.name}: {problem}')}")
            return None
        restore_checkpoint(best, engine, self._ranks)
        position.last_evaluation, position.evaluated_at = position.best_loss, position.step
        self._say(f"the weights of step {position.best_step} have the lowest held-out loss and are kept")
        return position.best_step

    def _checkpoint_of(self, step: int) -> Path:
        """The checkpoint of a step, of this run or of the one that it goes on with elsewhere."""
        own = self._run_dir / f"checkpoint-{step}"
        return own if self.checkpoint is None or own.exists() else self.checkpoint.parent / own.name
