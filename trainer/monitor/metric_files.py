"""metrics.jsonl and TensorBoard's events of a run, on a disk that may be full for a while.

A full disk does not stop training: a warning names the disk, and records are kept in memory until there is room again.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from trainer.contract.output_files import collect_disk_errors
from trainer.monitor.console import warn

METRICS_FILE = "metrics.jsonl"
MOST_KEPT_BYTES = 2**28


class AppendedFile:
    """A file to which each piece is appended completely or not at all; recreated if it was moved."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = self._open()
        self._unwritten = bytearray()

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def add(self, piece: bytes) -> None:
        """Queue a piece for the next `settle`, or drop it if too many bytes wait."""
        if len(self._unwritten) + len(piece) <= MOST_KEPT_BYTES:
            self._unwritten += piece

    def settle(self) -> None:
        """Write the queued pieces. Raises OSError and leaves the file as it was."""
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
            os.ftruncate(self._descriptor, end)  # a partial piece would make the file invalid
            raise
        self._unwritten.clear()

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class MetricFiles:
    """Appends records to `run_dir/metrics.jsonl` and, if wanted, scalars and images to TensorBoard's events."""

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
        """`first_step` is the number of steps done before; `settings` are shown in TensorBoard next to the curves."""
        self._run_dir, self._console = run_dir, console
        self._paused = self._closed = False
        self._records = AppendedFile(run_dir / METRICS_FILE)
        self._events = None
        if tensorboard:
            from trainer.monitor.tensorboard_events import Events  # costs a second, and other ranks never need it

            self._events = events = Events(run_dir, name, settings)
            self._write(lambda: events.open(first_step + 1))

    def write(self, record: Mapping[str, float | None], numbers: Mapping[str, float]) -> None:
        """Add one record: `record` to the file, `numbers` (NaN and infinity included) to the events."""
        self._records.add(json.dumps(record).encode() + b"\n")

        def add_scalars() -> None:
            if self._events is not None:
                self._events.add_scalars(int(record["step"] or 0), numbers)

        self._write(add_scalars)

    def write_image(self, step: int, tag: str, image: Any) -> None:
        """Add an image (PIL) to the events."""
        if (events := self._events) is not None:
            self._write(lambda: events.add_image(step, tag, image))

    def close(self) -> None:
        """Write all records that remain, and warn if the disk still refuses them. May be called twice."""
        if self._closed:
            return
        self._closed = True
        failures: list[str] = []
        with collect_disk_errors(failures, self._run_dir):
            self._records.settle()
        if failures:
            warn(self._console, f"the last metrics of this run are not written: {failures[0]}")
        self._records.close()
        if self._events is not None:
            self._events.close()

    def _write(self, to_events: Callable[[], object]) -> None:
        """Write the records that wait, then to the events; TensorBoard lacks what is logged while the disk is full."""
        failures: list[str] = []
        with collect_disk_errors(failures, self._run_dir):
            self._records.settle()
            to_events()
        if failures and not self._paused:
            warn(self._console, f"metrics wait for room on the disk, training continues: {failures[0]}")
        elif self._paused and not failures:
            self._console.print(f"metrics are written again; none is missing in {METRICS_FILE}", soft_wrap=True)
        self._paused = bool(failures)
