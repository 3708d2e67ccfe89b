"""The signs of life that every rank leaves for the others, for the launcher and for `zerolora status`.

logs/heartbeat-N.json    one line of JSON, written over every second or two by a thread of rank N, and a line with the
                         step under way, written over at its begin: who is killed is named with the right one
logs/hang.json           what the ranks agreed on when the run got nowhere: which rank is behind, and where
Without a folder that all hosts share the same lines go through the store of the process group.
"""

import datetime
import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

LINE_BYTES, STEP_BYTES = 768, 16
STORE_PATIENCE = datetime.timedelta(seconds=10)
OLD_S = 300.0
VERDICT_FILE = "hang.json"


@dataclass(frozen=True)
class Heartbeat:
    """What one rank does at one moment."""

    rank: int
    host: str
    pid: int
    step: int
    """Optimizer step under way; 0 before the first."""
    phase: str
    """As "save/gather", from the outermost to the innermost; empty between phases."""
    collective: str | None
    place: str | None
    """Innermost line of this project's code, told once the rank has stayed there."""
    collectives_begun: int | None
    idle_s: float
    """Seconds since it last got anywhere."""
    stuck: bool
    """Whether that is longer than training.hang_timeout allows here."""
    free_memory_gib: float
    free_shm_gib: float
    time: float
    """Seconds since 1970 by its own clock."""
    exit_code: int | None = None
    """Set by a rank that has ended by itself."""

    def line(self) -> bytes:
        """One line of JSON of always the same length, so that a reader never sees the rest of a longer one."""
        values = asdict(self) | {name: round(getattr(self, name), 3) for name in ("idle_s", "time")}
        return json.dumps(values).ljust(LINE_BYTES - 1).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> "Heartbeat | None":
        """The inverse of `line`; None for one that is half written."""
        try:
            return cls(**json.loads(line))
        except (ValueError, TypeError):
            return None


class Board(Protocol):
    """Where ranks leave their heartbeats and read the others'."""

    def publish(self, beat: Heartbeat) -> None: ...
    def read(self) -> dict[int, Heartbeat]: ...
    def verdict(self) -> str | None: ...
    def decide(self, verdict: str) -> bool: ...


class Folder:
    """A board in the logs folder of the run, once that exists: a run refused before it leaves nothing behind."""

    def __init__(self, logs: Path, rank: int, world_size: int) -> None:
        self._logs = logs
        self._rank = rank
        self._world_size = world_size
        self._file: int | None = None
        self._started = time.time()
        self.writes = True
        """False while the folder may be another run's."""

    def publish(self, beat: Heartbeat) -> None:
        """Write this rank's line over its last one; a full disk or a lost file system is not this thread's to tell."""
        try:
            if not self.writes:
                return
            if self._file is None and self._logs.is_dir():
                self._file = os.open(self._path(self._rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            if self._file is not None:
                os.pwrite(self._file, beat.line(), 0)
        except OSError as error:
            print(f"heartbeat of rank {self._rank}: {error}", file=sys.stderr)

    def note_step(self, step: int) -> None:
        """Write the step that begins, from the main thread: it needs microseconds, and outlives a SIGKILL."""
        if self._file is not None:
            with suppress(OSError):  # as in `publish`, which tells it every two seconds
                os.pwrite(self._file, f"{step:{STEP_BYTES - 1}d}\n".encode(), LINE_BYTES)

    def read(self) -> dict[int, Heartbeat]:
        """The latest line of every rank that has left one."""
        found = {}
        for rank in range(self._world_size):
            try:
                beat = Heartbeat.parse(self._path(rank).read_bytes()[:LINE_BYTES])
            except OSError:
                continue
            if beat is not None:
                found[rank] = beat
        return found

    def verdict(self) -> str | None:
        """What a rank has decided in this run; what an earlier run left is not looked at."""
        path = self._logs / VERDICT_FILE
        try:
            return path.read_text() if path.stat().st_mtime >= self._started - 1.0 else None
        except OSError:
            return None

    def decide(self, verdict: str) -> bool:
        """Leave a verdict; False if another rank was faster."""
        path = self._logs / VERDICT_FILE
        if path.exists() and self.verdict() is None:
            path.unlink(missing_ok=True)
        try:
            with open(path, "x") as file:
                file.write(verdict)
        except FileExistsError:
            return False
        return True

    def sees_everybody(self) -> bool:
        """Whether all ranks write into this very folder in this run."""
        now, beats = time.time(), self.read()
        # Ranks may tell different times; minutes of difference rather mean a line that an earlier run has left.
        alive = [beat for beat in beats.values() if beat.exit_code is None and abs(now - beat.time) < OLD_S]
        return len(alive) == self._world_size

    def _path(self, rank: int) -> Path:
        return self._logs / f"heartbeat-{rank}.json"


class Store:
    """A board in the store of the process group, for hosts that share no folder; the folder keeps its own host's."""

    def __init__(self, folder: Folder, rank: int, world_size: int) -> None:
        import torch.distributed as dist

        self._folder = folder
        self._rank = rank
        self._keys = [f"zerolora/heartbeat/{number}" for number in range(world_size)]
        # A connection of its own: the main thread may be waiting in the group's.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        module: Any = dist
        self._store: Any = module.TCPStore(
            address, port, is_master=False, timeout=STORE_PATIENCE, wait_for_workers=False
        )

    def publish(self, beat: Heartbeat) -> None:
        """As `Folder.publish`; a store that does not answer belongs to a rank 0 that the others will miss."""
        self._folder.publish(beat)
        try:
            self._store.set(self._keys[self._rank], beat.line())
        except RuntimeError as error:
            print(f"heartbeat of rank {self._rank}: {error}", file=sys.stderr)

    def read(self) -> dict[int, Heartbeat]:
        """The latest line of every rank that has left one."""
        found = self._folder.read()
        try:
            for rank, key in enumerate(self._keys):
                if self._store.check([key]):
                    beat = Heartbeat.parse(self._store.get(key))
                    if beat is not None:
                        found[rank] = beat
        except RuntimeError as error:
            print(f"heartbeats of the other hosts: {error}", file=sys.stderr)
        return found

    def verdict(self) -> str | None:
        """As `Folder.verdict`."""
        try:
            if self._store.check(["zerolora/hang"]):
                return str(self._store.get("zerolora/hang").decode())
        except RuntimeError as error:
            print(f"heartbeats of the other hosts: {error}", file=sys.stderr)
        return self._folder.verdict()

    def decide(self, verdict: str) -> bool:
        """As `Folder.decide`; every host's folder gets a copy."""
        first = True
        try:
            first = self._store.compare_set("zerolora/hang", "", verdict).decode() == verdict
        except RuntimeError as error:
            print(f"heartbeats of the other hosts: {error}", file=sys.stderr)
        return self._folder.decide(verdict) and first
