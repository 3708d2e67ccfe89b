"""metrics.jsonl and TensorBoard's events of a run, on a disk that may be full for a while.

What the disk refuses ends no training: it is kept in memory, with one line that names the disk, and written when there
is room again.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from trainer.contract.full_disk import disk_errors_into
from trainer.monitor.console import warn

METRICS_FILE = "metrics.jsonl"
MOST_KEPT_BYTES = 2**28


class AppendedFile:
    """A file that pieces are added to, each whole or not at all; a new one where it was moved away."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = self._open()
        self._unwritten = bytearray()

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def add(self, piece: bytes) -> None:
        """Keep a piece for the next `settle`, while there is memory for it."""
        if len(self._unwritten) + len(piece) <= MOST_KEPT_BYTES:
            self._unwritten += piece

    def settle(self) -> None:
        """Write what is not written yet. Raises OSError, with the file as it was."""
        if self._descriptor is None or not self._unwritten:
            return
        if not self._path.exists() or not os.path.samestat(self._path.stat(), os.fstat(self._descriptor)):
            moved, self._descriptor = self._descriptor, self._open()
            os.close(moved)
        end, written = os.fstat(self._descriptor).st_size, 0
        try:
            while written < len(self._unwritten):
                written += os.write(self._descriptor, self._unwritten[written:])
        except OSError:
            os.ftruncate(self._descriptor, end)  # half a piece would be read as damage
            raise
        self._unwritten.clear()

    def close(self) -> None:
        """Write no more; may be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class MetricFiles:
    """Appends records to `run_dir/metrics.jsonl` and, if wanted, scalars to an event file."""

    def __init__(
        self,
        run_dir: Path,
        name: str,
        console: Console,
        *,
        first_step: int,
        tensorboard: bool,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`first_step` optimizer steps are done already; `settings` are shown in TensorBoard beside the curves."""
        self._run_dir, self._console = run_dir, console
        self._paused = self._closed = False
        self._files = [AppendedFile(run_dir / METRICS_FILE)]
        self._events = None
        if tensorboard:
            from trainer.monitor.tensorboard_events import Events  # costs a second, and other ranks never need it

            self._events = Events(run_dir, name, first_step=first_step, settings=settings)
            self._files.append(self._events.file)
        self._settle()

    def write(self, record: Mapping[str, float | None], numbers: Mapping[str, float]) -> None:
        """Add one record: `record` to the file, `numbers` (NaN and infinity included) to the events."""
        self._files[0].add(json.dumps(record).encode() + b"\n")
        if self._events is not None:
            self._events.add(int(record["step"] or 0), numbers)
        self._settle()

    def write_picture(self, step: int, tag: str, picture: Any) -> None:
        """Add a picture (PIL) to the events."""
        if self._events is not None:
            self._events.add_picture(step, tag, picture)
            self._settle()

    def close(self) -> None:
        """Write what there still is to write; what the disk still refuses is told. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if failure := self._write_files():
            warn(self._console, f"the last metrics of this run are not written: {failure}")
        for file in self._files:
            file.close()

    def _settle(self) -> None:
        failure = self._write_files()
        if failure and not self._paused:
            warn(self._console, f"metrics wait for room on the disk, training goes on: {failure}")
        elif self._paused and not failure:
            self._console.print("metrics are written again, with those that waited", soft_wrap=True)
        self._paused = failure is not None

    def _write_files(self) -> str | None:
        failures: list[str] = []
        for file in self._files:
            with disk_errors_into(failures, self._run_dir):
                file.settle()
        return failures[0] if failures else None
