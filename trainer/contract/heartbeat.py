"""Write and read the heartbeats of the ranks.

Other ranks, the launcher and `zerolora status` read them.

logs/heartbeat-N.json    A line of JSON, overwritten every second or two by a thread in rank N. A second
                         line has the first and the current step. It is overwritten at the start of each
                         step, so the step of a killed rank is known.
logs/hang.json           The ranks' report on a hung run: which ranks are behind, and their positions.

All hosts must share the folder; trainer/parallel/ranks/agreement.py checks this.
"""

import json
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from trainer.config.files import (
    Count,
    ProcessId,
    Seconds,
    UnreadableFileError,
    parse_json,
    read_bytes,
    read_json_or_default,
)

LINE_BYTES, STEP_BYTES = 768, 32
MAX_BYTES, MAX_STEPS = 1 << 16, 2**63
ExitCode = Annotated[int, Field(gt=-(2**31), lt=2**31)]
BUILD_LOCK = "an extension build's lock (`zerolora doctor` shows it)"
"""The `place` of a rank that is waiting for another process to compile an operator."""
HANG_FILE = "hang.json"
STACK_PREFIX = "Python stack of rank"
"""Prefix of the line before the stack that a hung rank writes to its log."""


@dataclass(frozen=True)
class Heartbeat:
    rank: Count
    host: str
    pid: ProcessId
    step: Count
    """Current optimizer step; 0 before the first."""
    phase: str
    """Nested phases such as "save/gather"; empty between phases."""
    collective: str | None
    place: str | None
    """Innermost line of zerolora's code in the stack; None while the rank makes progress."""
    collectives_begun: int | None
    idle_s: Seconds
    """Seconds since the last progress."""
    stuck: bool
    """Whether `idle_s` exceeds training.hang_timeout."""
    free_memory_gib: float
    free_shm_gib: float
    time: Seconds
    """Seconds since 1970 by the rank's clock."""
    exit_code: ExitCode | None = None
    """Set by the rank before it exits."""
    first_step: Count = 0
    """First optimizer step of this process; 0 before it begins."""
    device_reached: int | None = None
    """Last mark that the GPU reached (trainer/parallel/ranks/watchdog.py); None while the rank makes progress."""

    @classmethod
    def missing(cls, rank: int) -> "Heartbeat":
        return cls(rank, "", 0, 0, "", None, None, None, 0.0, True, 0.0, 0.0, 0.0)

    @property
    def is_missing(self) -> bool:
        return self.pid == 0

    @property
    def has_completed_step(self) -> bool:
        return self.step > self.first_step > 0

    def describe_position(self) -> str:
        step = f"step {self.step}" if self.step else "before the first step"
        return f"{step}, phase {self.phase}" if self.phase else step

    def encode(self) -> bytes:
        """Encode the heartbeat as a JSON line of fixed length, so that it overwrites the previous one completely."""
        values = asdict(self) | {name: round(getattr(self, name), 3) for name in ("idle_s", "time")}
        return json.dumps(values).ljust(LINE_BYTES - 1).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> "Heartbeat | None":
        try:
            return parse_json(line, Path("heartbeat"), cls)
        except UnreadableFileError:
            return None


@dataclass(frozen=True)
class HangReport:
    """The ranks' report on a hung run."""

    ranks: Annotated[list[Count], Field(min_length=1)]
    """Ranks that are behind."""
    text: str


def read_hang_report(logs: Path) -> HangReport | None:
    return read_json_or_default(logs / HANG_FILE, HangReport)


def read_heartbeats(logs: Path) -> dict[int, Heartbeat]:
    """Return each rank's last heartbeat, omitting incomplete and damaged heartbeats."""
    beats: dict[int, Heartbeat] = {}
    try:
        paths = list(logs.glob("heartbeat-*.json"))
    except OSError:
        return beats
    for path in paths:
        try:
            line, _, step_line = read_bytes(path, MAX_BYTES).partition(b"\n")
            steps = [int(word) for word in step_line.split()]
        except (OSError, ValueError, UnreadableFileError):
            continue
        beat = Heartbeat.parse(line)
        if beat is None or path.stem != f"heartbeat-{beat.rank}":
            continue
        if steps and beat.step < steps[-1] < MAX_STEPS:
            # The heartbeat's phase belongs to the previous step.
            beat = replace(beat, step=steps[-1], first_step=steps[0], phase="")
        beats[beat.rank] = beat
    return beats


def clear_rank_reports(logs: Path) -> None:
    for path in (*logs.glob("heartbeat-*.json"), *logs.glob("error-*.json"), logs / HANG_FILE):
        path.unlink(missing_ok=True)


class HeartbeatFolder:
    """Reads and writes the heartbeats and hang report in a run's logs folder, once the folder exists."""

    def __init__(self, logs: Path, rank: int, world_size: int) -> None:
        self._logs = logs
        self._rank = rank
        self._world_size = world_size
        self._file: int | None = None
        self._last: Heartbeat | None = None
        self._opening = threading.Lock()
        self._started = time.time()
        self.writes = True
        """False while the folder may belong to another run."""

    @property
    def is_open(self) -> bool:
        """Whether this rank has written a heartbeat."""
        return self._file is not None

    def publish(self, beat: Heartbeat) -> None:
        """Overwrite this rank's heartbeat; print file system errors instead of raising them."""
        try:
            if not self.writes:
                return
            with self._opening:
                if self._file is not None and os.fstat(self._file).st_nlink == 0:
                    # The folder was emptied; other ranks expect a new file.
                    os.close(self._file)
                    self._file = None
                if self._file is None and self._logs.is_dir():
                    self._file = os.open(
                        self._logs / f"heartbeat-{self._rank}.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644
                    )
            if self._file is not None and self.writes:
                self._last = beat
                os.pwrite(self._file, beat.encode(), 0)
        except OSError as error:
            print(f"heartbeat of rank {self._rank}: {error}", file=sys.stderr)

    def write_step(self, step: int, first_step: int) -> None:
        """Write the current step and the first step of this process after the heartbeat.

        The step is then known even if the process is killed by SIGKILL. The main thread calls this in every step;
        it takes microseconds. Disk errors are ignored.
        """
        if self._file is not None:
            with suppress(OSError):  # `publish` prints such errors
                os.pwrite(self._file, f"{first_step} {step}".rjust(STEP_BYTES - 1).encode() + b"\n", LINE_BYTES)

    def write_exit_code(self, exit_code: int) -> None:
        """Write the last heartbeat again with the exit code, and disable `publish`.

        Does not take a lock, so signal handlers can call it. Disk errors are ignored.
        """
        file, last = self._file, self._last
        if file is not None and last is not None and self.writes:
            self.writes = False
            with suppress(OSError):
                os.pwrite(file, replace(last, exit_code=exit_code, time=time.time()).encode(), 0)

    def read(self) -> dict[int, Heartbeat]:
        return {rank: beat for rank, beat in read_heartbeats(self._logs).items() if rank < self._world_size}

    def read_report(self) -> HangReport | None:
        return read_hang_report(self._logs) if self._has_hang_report() else None

    def _has_hang_report(self) -> bool:
        """Return whether a rank has written a hang report for this run; the report may still be incomplete."""
        try:
            return (self._logs / HANG_FILE).stat().st_mtime >= self._started - 1.0
        except OSError:
            return False

    def write_report(self, report: HangReport) -> bool:
        """Write the hang report; return False if another rank has already written one."""
        path = self._logs / HANG_FILE
        if not self._has_hang_report():
            path.unlink(missing_ok=True)
        try:
            with open(path, "x") as file:
                file.write(json.dumps(asdict(report)))
        except FileExistsError:
            return False
        return True
