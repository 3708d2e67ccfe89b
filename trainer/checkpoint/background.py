"""Checkpoints written while training goes on: copied to host memory in passing, written by a thread of every rank.

`copy` gathers what a partitioned model has to gather and asks for the copies while the device is still in the step;
`begin`, once the numbers of the step are known, has them written; `finish`, called before the next `copy` and at the
end, has the ranks tell each other how their writing went. In between each rank writes its files, flushes them and
leaves a mark beside them; when rank 0 has seen all marks it seals the folder and gives it its name. Until then the
older checkpoints are as they were, whoever is killed.
"""

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.checkpoint.checkpoint import RankState, sizes_of
from trainer.checkpoint.checkpoint_files import oldest_beyond, publish
from trainer.checkpoint.host_copies import HostCopies, Size
from trainer.config import UserError
from trainer.contract.full_disk import disk_errors_into
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks
from trainer.parallel.ranks.progress import phase

LOOK_EVERY_S = 0.05
WriteWeights = Callable[[Path], None]
"""Writes copied weights, on rank 0 alone."""


class SaveFailed(UserError):
    """The disk refused a checkpoint, on whatever rank; all ranks know, and the older ones are as they were."""

    exit_code = 1


@dataclass(frozen=True)
class PublishOptions:
    """What rank 0 does with a checkpoint once it is written."""

    keep: int | None
    """How many whole ones may stay."""
    protect: tuple[int, ...]
    """Steps whose checkpoints stay all the same."""
    later: list[Path]
    """Checkpoints of a course that this run has left: they step aside when this one is whole."""
    before_publishing: Callable[[], None]
    """Called when all is written; if it raises, the older checkpoints stay as they were."""
    after_publishing: Callable[[list[Path]], None]
    """Called at once, in the writing thread, with the new names of what stepped aside."""


class Saves:
    """The checkpoints of one run on one rank, one at a time."""

    def __init__(self, run_dir: Path, ranks: Ranks) -> None:
        self._run_dir, self._ranks = run_dir, ranks
        self._copies = HostCopies()
        self._copied: RankState | None = None
        self._current: _Save | None = None
        self._preparing: threading.Thread | None = None
        self._has_memory = threading.Event()

    def prepare(self, engine: Engine, also: Callable[[], object]) -> None:
        """Have a thread do what the first save would stop the training for: page-locked memory, and `also`."""
        sizes = sizes_of(engine, self._ranks)
        self._preparing = threading.Thread(target=self._prepare, args=(sizes, also), name="save", daemon=True)
        self._preparing.start()

    def _prepare(self, sizes: list[Size], also: Callable[[], object]) -> None:
        with suppress(Exception):  # the save that needs it meets the same again, and raises it
            try:
                self._copies.reserve(sizes)
            finally:
                self._has_memory.set()
            also()

    def copy(self, engine: Engine, weights: Callable[[HostCopies], object]) -> None:
        """Ask for copies of the engine's state, and of what `weights` copies; every rank must call it.

        They are of when the device has done what it was given until now. The save before must be finished.
        """
        assert self._current is None, "the save before was not finished"
        if self._preparing is not None:
            self._has_memory.wait()
        self._copied = RankState.of(engine, self._ranks, self._copies)
        with phase("gather"):
            weights(self._copies)
        self._copies.begun()

    def hold_changes(self) -> None:
        """Before what is copied is changed by the next update: have the device wait for the copies, not the host."""
        self._copies.hold_changes()

    def begin(
        self, engine: Engine, position: dict[str, Any], write_copied: WriteWeights, order: PublishOptions
    ) -> None:
        """Let what was copied be written as `checkpoint-<position["step"]>`; every rank must call it.

        Raises SaveFailed, on every rank, if its folder cannot be made.
        """
        assert self._copied is not None, "nothing was copied"
        own, self._copied = self._copied.at(position, engine, self._ranks), None
        final = self._run_dir / f"checkpoint-{position['step']}"
        folder = self._run_dir / f".writing-{final.name}"
        failures: list[str] = []
        with disk_errors_into(failures, self._run_dir):
            if self._ranks.is_main:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
        self._agree(_Report(failures), folder)

        def write_weights(folder: Path) -> None:
            if self._preparing is not None:
                self._preparing.join()
            write_copied(folder)

        self._current = _Save(folder, final, own, write_weights, self._copies, order, self._ranks)

    def finish(self) -> list[Path] | None:
        """Wait until the save under way is whole; rank 0 gets the new names of what stepped aside, None without a save.

        Every rank must call it. Raises SaveFailed on all of them if the disk of any was full, and what else went wrong.
        """
        save, self._current = self._current, None
        if save is None:
            return None
        save.written.wait()
        self._agree(save.report(), save.folder, save)
        if self._ranks.is_main:
            save.all_have_written.set()
            save.thread.join()
        self._agree(save.report(), save.folder, save)
        return save.aside

    def wait(self, seconds: float) -> None:
        """Give a checkpoint that is being written a little more time, on this rank alone: the run has failed."""
        if self._current is not None:
            self._current.thread.join(seconds)

    def _agree(self, report: "_Report", folder: Path, save: "_Save | None" = None) -> None:
        """Compare how writing went on all ranks; if any disk was full, remove what was written and raise on all."""
        everyones: list[_Report] = [report]
        if dist.is_initialized() and self._ranks.world_size > 1:
            everyones = [report] * self._ranks.world_size
            dist.all_gather_object(everyones, _Report(report.failures, report.error))
        failures = [reason for other in everyones for reason in other.failures]
        errors = [(rank, other.error) for rank, other in enumerate(everyones) if other.error]
        if not failures and not errors:
            return
        if save is not None and self._ranks.is_main:
            save.is_lost.set()
            save.thread.join()
        if self._ranks.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        if report.exception is not None:
            raise report.exception
        if errors:
            raise RuntimeError(f"rank {errors[0][0]} could not write {folder.name}: {errors[0][1]}")
        name = folder.name.removeprefix(".writing-")
        raise SaveFailed(f"{name} was not saved: {failures[0]}; make room; the older checkpoints are as they were")


@dataclass(frozen=True)
class _Report:
    """How one rank's writing went."""

    failures: list[str]
    error: str = ""
    exception: BaseException | None = None
    """On this rank only."""


class _Save:
    """One checkpoint on its way to the disk, on one rank."""

    def __init__(
        self,
        folder: Path,
        final: Path,
        own: RankState,
        write_weights: WriteWeights,
        copies: HostCopies,
        order: PublishOptions,
        ranks: Ranks,
    ) -> None:
        self.folder, self._final, self._own, self._write_weights = folder, final, own, write_weights
        self._copies, self._order, self._ranks = copies, order, ranks
        self.aside: list[Path] = []
        self.written, self.all_have_written, self.is_lost = threading.Event(), threading.Event(), threading.Event()
        self._failures: list[str] = []
        self._exception: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="save", daemon=True)
        self.thread.start()

    def report(self) -> _Report:
        """How it went so far."""
        error = self._exception
        return _Report(self._failures, f"{type(error).__name__}: {error}" if error else "", error)

    def _run(self) -> None:
        try:
            with disk_errors_into(self._failures, self.folder.parent):
                self._write()
            self.written.set()
            if self._ranks.is_main and not self._failures and self._wait_for_others():
                with disk_errors_into(self._failures, self.folder.parent):
                    self._publish()
        except BaseException as error:  # the main thread's to raise
            self._exception = error
        finally:
            self.written.set()

    def _write(self) -> None:
        self._copies.wait()
        if self._ranks.is_main:
            self._write_weights(self.folder)
        for file in self._own.write(self.folder):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._mark(self._ranks.rank).touch()

    def _wait_for_others(self) -> bool:
        """Until every rank has written its files; False if one of them cannot."""
        while not self.all_have_written.is_set():
            if self.is_lost.is_set():
                return False
            if all(self._mark(rank).exists() for rank in range(self._ranks.world_size)):
                break
            self.is_lost.wait(LOOK_EVERY_S)
        return not self.is_lost.is_set()

    def _publish(self) -> None:
        for rank in range(self._ranks.world_size):
            self._mark(rank).unlink(missing_ok=True)
        self._order.before_publishing()
        self.aside = publish(self.folder, self._final, self._order.later)
        self._order.after_publishing(self.aside)
        step = int(self._own.state["step"])
        for checkpoint in list(oldest_beyond(self.folder.parent, self._order.keep, (*self._order.protect, step))):
            shutil.rmtree(checkpoint)

    def _mark(self, rank: int) -> Path:
        return self.folder / f".written-{rank:05d}"
