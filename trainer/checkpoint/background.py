"""Asynchronous checkpoints: state is copied to host memory during the step and written by a thread on every rank.

`copy` gathers partitioned weights and queues the copies while the device still computes the step; `begin`, once the
loss of the step is known, starts the writing; `finish`, called before the next `copy` and at the end, exchanges the
outcome between ranks. In between each rank writes and flushes its files and creates a marker file; when rank 0 has seen
all markers it seals the folder and renames it. Until then older checkpoints are untouched, whichever process dies.
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

from trainer.checkpoint.checkpoint import RankState, checkpoint_sizes
from trainer.checkpoint.checkpoint_files import publish, surplus_checkpoints
from trainer.checkpoint.host_copies import HostCopies, Size
from trainer.config import UserError
from trainer.contract.output_files import collect_disk_errors
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks
from trainer.parallel.ranks.progress import phase

POLL_INTERVAL_S = 0.05
WriteWeights = Callable[[Path], None]
"""Writes the copied weights; called on rank 0 only."""


class SaveFailed(UserError):
    """A checkpoint could not be written on some rank; raised on all ranks, older checkpoints are untouched."""

    exit_code = 1


@dataclass(frozen=True)
class PublishOptions:
    """Options for publishing a written checkpoint, used by rank 0."""

    keep: int | None
    """Number of complete checkpoints to keep."""
    protect: tuple[int, ...]
    """Steps of checkpoints that are never deleted."""
    later: list[Path]
    """Checkpoints of an earlier run beyond the step this one resumed from; renamed once this one is complete."""
    before_publishing: Callable[[], None]
    """Called when all files are written; if it raises, older checkpoints are untouched."""
    after_publishing: Callable[[list[Path]], None]
    """Called in the writing thread with the new names of the renamed checkpoints."""


class CheckpointSaver:
    """Writes a run's checkpoints on one rank, one at a time."""

    def __init__(self, run_dir: Path, ranks: Ranks) -> None:
        self._run_dir, self._ranks = run_dir, ranks
        self._copies = HostCopies()
        self._copied: RankState | None = None
        self._current: _Save | None = None
        self._preparing: threading.Thread | None = None
        self._has_memory = threading.Event()

    def prepare(self, engine: Engine, also: Callable[[], object]) -> None:
        """Allocate pinned memory and call `also` in a thread, so that the first save does not stall training."""
        sizes = checkpoint_sizes(engine, self._ranks)
        self._preparing = threading.Thread(target=self._prepare, args=(sizes, also), name="save", daemon=True)
        self._preparing.start()

    def _prepare(self, sizes: list[Size], also: Callable[[], object]) -> None:
        with suppress(Exception):  # the save that needs it fails in the same way, and raises
            try:
                self._copies.reserve(sizes)
            finally:
                self._has_memory.set()
            also()

    def copy(self, engine: Engine, weights: Callable[[HostCopies], object]) -> None:
        """Queue copies of the engine's state, and of what `weights` copies, behind the work queued so far.

        A collective call; the previous save must be finished.
        """
        assert self._current is None, "the previous save was not finished"
        if self._preparing is not None:
            self._has_memory.wait()
        self._copied = RankState.capture(engine, self._ranks, self._copies)
        with phase("gather"):
            weights(self._copies)
        self._copies.mark_queued()

    def make_updates_wait(self) -> None:
        """Make the device, not the host, wait for the copies before the next update changes the tensors."""
        self._copies.make_updates_wait()

    def begin(
        self, engine: Engine, position: dict[str, Any], write_copied: WriteWeights, options: PublishOptions
    ) -> None:
        """Start writing the copies as `checkpoint-<position["step"]>`; a collective call.

        Raises SaveFailed, on every rank, if the folder cannot be created.
        """
        assert self._copied is not None, "nothing was copied"
        rank_state, self._copied = self._copied.complete(position, engine, self._ranks), None
        final = self._run_dir / f"checkpoint-{position['step']}"
        folder = self._run_dir / f".writing-{final.name}"
        failures: list[str] = []
        with collect_disk_errors(failures, self._run_dir):
            if self._ranks.is_main:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
        self._exchange_outcomes(_Report(failures), folder)

        def write_weights(folder: Path) -> None:
            if self._preparing is not None:
                self._preparing.join()
            write_copied(folder)

        self._current = _Save(folder, final, rank_state, write_weights, self._copies, options, self._ranks)

    def finish(self) -> list[Path] | None:
        """Wait for the current save; return the new names of renamed checkpoints (on rank 0), None without a save.

        A collective call. Raises SaveFailed on all ranks if a disk was full, and any other error unchanged.
        """
        save, self._current = self._current, None
        if save is None:
            return None
        save.written.wait()
        self._exchange_outcomes(save.report(), save.folder, save)
        if self._ranks.is_main:
            save.all_have_written.set()
            save.thread.join()
        self._exchange_outcomes(save.report(), save.folder, save)
        return save.renamed

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for the current save, on this rank only, after the run has failed."""
        if self._current is not None:
            self._current.thread.join(seconds)

    def _exchange_outcomes(self, report: "_Report", folder: Path, save: "_Save | None" = None) -> None:
        """Exchange the outcome between ranks; if any rank failed, remove what was written and raise on all."""
        reports: list[_Report] = [report]
        if dist.is_initialized() and self._ranks.world_size > 1:
            reports = [report] * self._ranks.world_size
            dist.all_gather_object(reports, _Report(report.failures, report.error))
        failures = [reason for other in reports for reason in other.failures]
        errors = [(rank, other.error) for rank, other in enumerate(reports) if other.error]
        if not failures and not errors:
            return
        if save is not None and self._ranks.is_main:
            save.has_failed.set()
            save.thread.join()
        if self._ranks.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        if report.exception is not None:
            raise report.exception
        if errors:
            raise RuntimeError(f"rank {errors[0][0]} could not write {folder.name}: {errors[0][1]}")
        name = folder.name.removeprefix(".writing-")
        raise SaveFailed(f"{name} was not saved: {failures[0]}; make room; older checkpoints are untouched")


@dataclass(frozen=True)
class _Report:
    """The outcome of writing on one rank."""

    failures: list[str]
    error: str = ""
    exception: BaseException | None = None
    """Set on this rank only."""


class _Save:
    """One checkpoint being written, on one rank."""

    def __init__(
        self,
        folder: Path,
        final: Path,
        rank_state: RankState,
        write_weights: WriteWeights,
        copies: HostCopies,
        options: PublishOptions,
        ranks: Ranks,
    ) -> None:
        self.folder, self._final, self._rank_state, self._write_weights = folder, final, rank_state, write_weights
        self._copies, self._options, self._ranks = copies, options, ranks
        self.renamed: list[Path] = []
        self.written, self.all_have_written, self.has_failed = threading.Event(), threading.Event(), threading.Event()
        self._failures: list[str] = []
        self._exception: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="save", daemon=True)
        self.thread.start()

    def report(self) -> _Report:
        error = self._exception
        return _Report(self._failures, f"{type(error).__name__}: {error}" if error else "", error)

    def _run(self) -> None:
        try:
            with collect_disk_errors(self._failures, self.folder.parent):
                self._write()
            self.written.set()
            if self._ranks.is_main and not self._failures and self._wait_for_others():
                with collect_disk_errors(self._failures, self.folder.parent):
                    self._publish()
        except BaseException as error:  # raised again by the main thread
            self._exception = error
        finally:
            self.written.set()

    def _write(self) -> None:
        self._copies.wait()
        if self._ranks.is_main:
            self._write_weights(self.folder)
        for file in self._rank_state.write(self.folder):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._marker_path(self._ranks.rank).touch()

    def _wait_for_others(self) -> bool:
        """Return True once every rank has written its files, False if one of them failed."""
        while not self.all_have_written.is_set():
            if self.has_failed.is_set():
                return False
            if all(self._marker_path(rank).exists() for rank in range(self._ranks.world_size)):
                break
            self.has_failed.wait(POLL_INTERVAL_S)
        return not self.has_failed.is_set()

    def _publish(self) -> None:
        for rank in range(self._ranks.world_size):
            self._marker_path(rank).unlink(missing_ok=True)
        self._options.before_publishing()
        self.renamed = publish(self.folder, self._final, self._options.later)
        self._options.after_publishing(self.renamed)
        protect = (*self._options.protect, int(self._rank_state.state["step"]))
        for checkpoint in list(surplus_checkpoints(self.folder.parent, self._options.keep, protect)):
            shutil.rmtree(checkpoint)

    def _marker_path(self, rank: int) -> Path:
        return self.folder / f".written-{rank:05d}"
