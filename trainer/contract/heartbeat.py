"""The signs of life that every rank leaves for the others, for the launcher and for `zerolora status`.

logs/heartbeat-N.json    one line of JSON, written over every second or two by a thread of rank N, and a line with the
                         first step and the one under way, written over at its begin: who is killed is named with the
                         right one
logs/hang.json           what the ranks agreed on when the run got nowhere: which rank is behind, and where
All hosts share the folder; trainer/parallel/ranks/agreement.py refuses a run whose hosts do not.
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

from trainer.config.files import Count, ProcessId, Seconds, UnreadableFile, find_json, parse_json, read_bytes

LINE_BYTES, STEP_BYTES = 768, 32
MOST_BYTES, MOST_STEPS = 1 << 16, 2**63
ExitCode = Annotated[int, Field(gt=-(2**31), lt=2**31)]
BUILD_LOCK = "the lock of an extension build (zerolora doctor finds it)"
"""A rank's `place` while it waits for another process that compiles an operator."""
VERDICT_FILE = "hang.json"


@dataclass(frozen=True)
class Heartbeat:
    """What one rank does at one moment."""

    rank: Count
    host: str
    pid: ProcessId
    step: Count
    """Optimizer step under way; 0 before the first."""
    phase: str
    """As "save/gather", from the outermost to the innermost; empty between phases."""
    collective: str | None
    place: str | None
    """Innermost line of this project's code, told once the rank has stayed there."""
    collectives_begun: int | None
    idle_s: Seconds
    """Seconds since it last got anywhere."""
    stuck: bool
    """Whether that is longer than training.hang_timeout allows here."""
    free_memory_gib: float
    free_shm_gib: float
    time: Seconds
    """Seconds since 1970 by its own clock."""
    exit_code: ExitCode | None = None
    """Set by a rank that has ended by itself."""
    first_step: Count = 0
    """The optimizer step that this process began with; 0 before it."""
    device_reached: int | None = None
    """The last mark that its GPU has come to (trainer/parallel/ranks/device_marks.py); told as `place` is."""

    @classmethod
    def of_nobody(cls, rank: int, host: str) -> "Heartbeat":
        """In place of that of a rank which has left none; `host` is empty where it is not known."""
        return cls(rank, host, 0, 0, "", None, None, None, 0.0, True, 0.0, 0.0, 0.0)

    @property
    def is_nobodys(self) -> bool:
        """Whether it stands for a rank that has left none."""
        return self.pid == 0

    @property
    def has_gained(self) -> bool:
        """Whether a whole step was made since the process began."""
        return self.step > self.first_step > 0

    @property
    def waits_for_build(self) -> bool:
        """For the lock of another process that compiles an operator."""
        return self.place == BUILD_LOCK

    def where(self) -> str:
        """Where in the run it was, as "step 412, phase backward"."""
        step = f"step {self.step}" if self.step else "before the first step"
        return f"{step}, phase {self.phase}" if self.phase else step

    def line(self) -> bytes:
        """One line of JSON of always the same length, so that a reader never sees the rest of a longer one."""
        values = asdict(self) | {name: round(getattr(self, name), 3) for name in ("idle_s", "time")}
        return json.dumps(values).ljust(LINE_BYTES - 1).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> "Heartbeat | None":
        """Undo `line`; None for one that is half written or damaged."""
        try:
            beat: Heartbeat = parse_json(line, Path("heartbeat"), cls)
        except UnreadableFile:
            return None
        return beat


@dataclass(frozen=True)
class Hang:
    """What the ranks of a run that gets nowhere agree on."""

    ranks: Annotated[list[Count], Field(min_length=1)]
    """Those that are behind."""
    text: str


def read_hang(logs: Path) -> Hang | None:
    """Return what the ranks have agreed on; None if there is nothing, or nothing that can be read."""
    hang: Hang | None = find_json(logs / VERDICT_FILE, Hang)
    return hang


def read_heartbeats(logs: Path) -> dict[int, Heartbeat]:
    """Return rank -> its last heartbeat; a half-written or damaged one, or a lost folder, is left out."""
    beats: dict[int, Heartbeat] = {}
    try:
        paths = list(logs.glob("heartbeat-*.json"))
    except OSError:
        return beats
    for path in paths:
        try:
            line, _, noted = read_bytes(path, MOST_BYTES).partition(b"\n")
            steps = [int(word) for word in noted.split()]
        except (OSError, ValueError, UnreadableFile):
            continue
        beat = Heartbeat.parse(line)
        if beat is None or path.stem != f"heartbeat-{beat.rank}":
            continue
        if steps and beat.step < steps[-1] < MOST_STEPS:
            # The phase still belongs to the step before.
            beat = replace(beat, step=steps[-1], first_step=steps[0], phase="")
        beats[beat.rank] = beat
    return beats


def clear_heartbeats(logs: Path) -> None:
    """Remove what an earlier run left."""
    for path in (*logs.glob("heartbeat-*.json"), logs / VERDICT_FILE):
        path.unlink(missing_ok=True)


class Folder:
    """Heartbeats in the logs folder of the run, once that exists: a run refused before it leaves nothing behind."""

    def __init__(self, logs: Path, rank: int, world_size: int) -> None:
        self._logs = logs
        self._rank = rank
        self._world_size = world_size
        self._file: int | None = None
        self._last: Heartbeat | None = None
        self._opening = threading.Lock()
        self._started = time.time()
        self.writes = True
        """False while the folder may be another run's."""

    @property
    def is_open(self) -> bool:
        """Whether this rank has left a line."""
        return self._file is not None

    def publish(self, beat: Heartbeat) -> None:
        """Write this rank's line over its last one; a full disk or a lost file system is not this thread's to tell."""
        try:
            if not self.writes:
                return
            with self._opening:
                if self._file is not None and os.fstat(self._file).st_nlink == 0:
                    # Somebody has emptied the folder: the others look for a new file.
                    os.close(self._file)
                    self._file = None
                if self._file is None and self._logs.is_dir():
                    self._file = os.open(self._path(self._rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            if self._file is not None and self.writes:
                self._last = beat
                os.pwrite(self._file, beat.line(), 0)
        except OSError as error:
            print(f"heartbeat of rank {self._rank}: {error}", file=sys.stderr)

    def note_step(self, step: int, first: int) -> None:
        """Write the step that begins, from the main thread: it needs microseconds, and outlives a SIGKILL."""
        if self._file is not None:
            with suppress(OSError):  # as in `publish`, which tells it every two seconds
                os.pwrite(self._file, f"{first} {step}".rjust(STEP_BYTES - 1).encode() + b"\n", LINE_BYTES)

    def note_end(self, exit_code: int) -> None:
        """Write the exit code into the line that stands, from a signal's handler: no lock is taken."""
        file, last = self._file, self._last
        if file is not None and last is not None and self.writes:
            self.writes = False
            with suppress(OSError):
                os.pwrite(file, replace(last, exit_code=exit_code, time=time.time()).line(), 0)

    def read(self) -> dict[int, Heartbeat]:
        """Return the latest line of every rank that has left one."""
        found = {}
        for rank in range(self._world_size):
            try:
                beat = Heartbeat.parse(read_bytes(self._path(rank), MOST_BYTES)[:LINE_BYTES])
            except (OSError, UnreadableFile):
                continue
            if beat is not None and beat.rank == rank:
                found[rank] = beat
        return found

    def verdict(self) -> Hang | None:
        """Return what a rank has decided in this run."""
        return read_hang(self._logs) if self._is_decided() else None

    def _is_decided(self) -> bool:
        """Whether there is a verdict, perhaps half written, that no earlier run has left."""
        try:
            return (self._logs / VERDICT_FILE).stat().st_mtime >= self._started - 1.0
        except OSError:
            return False

    def decide(self, verdict: Hang) -> bool:
        """Leave a verdict; False if another rank was faster."""
        path = self._logs / VERDICT_FILE
        if not self._is_decided():
            path.unlink(missing_ok=True)
        try:
            with open(path, "x") as file:
                file.write(json.dumps(asdict(verdict)))
        except FileExistsError:
            return False
        return True

    def _path(self, rank: int) -> Path:
        return self._logs / f"heartbeat-{rank}.json"
