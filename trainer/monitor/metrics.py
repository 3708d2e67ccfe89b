"""Write the metrics of a run to metrics.jsonl, trackers and the console, on rank 0.

A full disk does not stop training: a warning is printed, and records stay in memory until the disk has space again.
"""

import importlib.util
import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from trainer.config import LoggingSection, UserError
from trainer.config.files import UnreadableFileError, read_bytes
from trainer.contract.json_records import MAX_METRICS_BYTES, parse_record
from trainer.contract.json_records import Record as Record
from trainer.contract.output_files import collect_disk_errors
from trainer.contract.whole_files import write_text_atomic
from trainer.monitor.console import warn
from trainer.monitor.display import Display
from trainer.monitor.trackers import Trackers

METRICS_FILE = "metrics.jsonl"
GPU_READ_INTERVAL_S = 2.0
"""Minimum time between readings of the GPU's counters, which take milliseconds."""


def check_reporters(logging: LoggingSection) -> None:
    """Raise UserError if a package in `logging.report_to` is not installed. Does not import packages."""
    for name in logging.report_to:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"logging.report_to={name}: the package is not installed; run `pip install {name}`, or remove {name}"
            )


def read_metrics(run_dir: Path) -> list[Record]:
    """Return the records of `run_dir/metrics.jsonl` in file order, omitting a truncated last line.

    Raises UserError if the file is missing or another line is invalid.
    """
    path = run_dir / METRICS_FILE
    try:
        lines = read_bytes(path, MAX_METRICS_BYTES).split(b"\n")
    except FileNotFoundError:
        problem = f"has no {METRICS_FILE}" if run_dir.is_dir() else "not a folder"
        raise UserError(f"{run_dir}: {problem}; use the output folder of a run that has trained") from None
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            records += [parse_record(line, path)] if line else []
        except UnreadableFileError as error:
            if number < len(lines) or number == 1:
                problem = f"line {number} is not a record of a step ({error.problem})"
                raise UserError(f"{path}: {problem}; fix or remove that line") from None
    return records


class Metrics:
    """Writes the metrics of a run and shows its progress.

    The run resumes after `completed_steps` optimizer steps (0 for a fresh run). Records of later steps are removed from
    metrics.jsonl and hidden in TensorBoard, so that every step appears once.
    """

    def __init__(
        self,
        run_dir: Path,
        logging: LoggingSection,
        console: Console,
        *,
        first_step: int,
        total_steps: int,
        before_writing: Callable[[], None] = lambda: None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Open metrics.jsonl and the trackers. `before_writing` raises if the folder no longer belongs to this run."""
        check_reporters(logging)
        self._before_writing, self._console = before_writing, console
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / METRICS_FILE
        if self._path.is_file():
            records = read_metrics(run_dir) if first_step else []
            earlier = [record for record in records if (record["step"] or 0) <= first_step]
            write_text_atomic(self._path, "".join(json.dumps(record) + "\n" for record in earlier))
        self._path.touch()
        self._unwritten = b""
        self._trackers = Trackers(logging, run_dir, settings or {}, console.print, first_step)
        self.display = Display(console, logging.progress, total_steps=total_steps)
        self._gpu: dict[str, float] = {}
        self._gpu_read = -math.inf

    def log(self, step: int, values: Mapping[str, float]) -> None:
        numbers = {key: float(value) for key, value in values.items()}
        if "train/loss" in numbers:
            if time.monotonic() - self._gpu_read > GPU_READ_INTERVAL_S:
                self._gpu, self._gpu_read = read_gpu_metrics(), time.monotonic()
            numbers |= self._gpu
        # NaN is not valid JSON; other readers would reject the file.
        finite = {key: number if math.isfinite(number) else None for key, number in numbers.items()}
        self._before_writing()
        had_unwritten = bool(self._unwritten)
        self._unwritten += json.dumps({"step": step, "time": round(time.time(), 3), **finite}).encode() + b"\n"
        problem = self._write()
        if problem and not had_unwritten:
            warn(self._console, f"{problem}; training continues, and metrics stay in memory until they can be written")
        elif had_unwritten and not problem:
            self._console.print(f"metrics are being written again; {METRICS_FILE} is complete", soft_wrap=True)
        self._trackers.log(step, numbers)
        self.display.print_line(step, numbers)

    def _write(self) -> str | None:
        """Append all unwritten records, or none if the disk is full; return the error, or None."""
        failures: list[str] = []
        with collect_disk_errors(failures, self._path.parent), self._path.open("ab", buffering=0) as file:
            end, written = file.tell(), 0
            try:
                while written < len(self._unwritten):
                    written += file.write(self._unwritten[written:])
            except OSError:
                file.truncate(end)  # a partial record would make the file invalid
                raise
            self._unwritten = b""
        return failures[0] if failures else None

    def log_image(self, step: int, name: str, image: Any) -> None:
        self._trackers.log_image(step, f"samples/{name}", image)

    def close(self) -> None:
        """Stop the bar, write the remaining records and close all trackers; may be called twice."""
        self.display.stop()
        if self._unwritten and (problem := self._write()):
            warn(self._console, f"the last metrics of this run were not written: {problem}")
            self._unwritten = b""
        self._trackers.close()


def read_gpu_metrics() -> dict[str, float]:
    """Return gpu/utilization (% of the time), gpu/power_watts and gpu/memory_gib (of all processes), if available."""
    import torch  # not needed by readers of metrics.jsonl

    values: dict[str, float] = {}
    if torch.cuda.is_available():
        cuda = torch.cuda
        for name, read, unit in (
            ("gpu/utilization", cuda.utilization, 1.0),
            ("gpu/power_watts", cuda.power_draw, 1e3),
            ("gpu/memory_gib", cuda.device_memory_used, 2.0**30),
        ):
            with suppress(Exception):  # no nvidia-ml-py, a MIG slice, or a GPU that does not report it
                values[name] = read() / unit
    return values
