"""The heartbeats of ranks in a run's logs, from trainer/contract/heartbeat.py: who is where, doing what."""

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HANG_FILE = "hang.json"
# Longer than any interval between two heartbeats, by far.
SILENCE_S = 60.0

# How a rank's `place` begins while it waits for it; trainer/ranks/vital_signs.py.
BUILD_LOCK = "the lock of an extension build"
NAMES = ("rank", "host", "pid", "step", "phase", "exit_code", "free_memory_gib", "free_shm_gib", "time")


@dataclass(frozen=True)
class Beat:
    """The last heartbeat of one rank."""

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    exit_code: int | None
    free_memory_gib: float
    free_shm_gib: float
    time: float
    waits_for_build: bool = False
    """For the lock of another process that compiles an operator."""

    def place(self) -> str:
        """Where in the run it was, as "step 412, phase backward"."""
        step = f"step {self.step}" if self.step else "before the first step"
        return f"{step}, phase {self.phase}" if self.phase else step


def own_host() -> str:
    """This host as its ranks call it in their heartbeats."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def read_beats(logs: Path) -> dict[int, Beat]:
    """Rank -> its last heartbeat, for all that have left one; a half-written line is left out."""
    beats: dict[int, Beat] = {}
    for path in logs.glob("heartbeat-*.json"):
        try:
            line, _, step = path.read_bytes().partition(b"\n")
            values = json.loads(line)
            beat = Beat(**{name: values[name] for name in NAMES})
            if str(values.get("place")).startswith(BUILD_LOCK):
                beat = replace(beat, waits_for_build=True)
            if step.strip() and int(step) > beat.step:
                beat = replace(beat, step=int(step), phase="")  # the phase is of the step before
        except (OSError, ValueError, KeyError, TypeError):
            continue
        beats[beat.rank] = beat
    return beats


def read_hang(logs: Path) -> Mapping[str, Any] | None:
    """What the ranks of a run that got nowhere have agreed on: `ranks` that are behind, and `text`."""
    try:
        found: Mapping[str, Any] = json.loads((logs / HANG_FILE).read_text())
        return found
    except (OSError, ValueError):
        return None


def clear_beats(logs: Path) -> None:
    """Remove what an earlier run left."""
    for path in (*logs.glob("heartbeat-*.json"), logs / HANG_FILE):
        path.unlink(missing_ok=True)


class Silence:
    """Notices that all heartbeats have stopped, which no rank is left to notice."""

    def __init__(self, logs: Path, hang_timeout_s: float) -> None:
        self._logs = logs
        self._allowed_s = 1.5 * hang_timeout_s + SILENCE_S
        self._watches = hang_timeout_s > 0
        self._latest: dict[int, Beat] = {}
        self._changed_at = time.monotonic()

    def is_complete(self) -> bool:
        """True once no rank that has begun and not ended has given a sign of life for 1.5 hang_timeout and a minute."""
        if not self._watches:
            return False
        beats = {rank: beat for rank, beat in read_beats(self._logs).items() if beat.exit_code is None}
        now = time.monotonic()
        if beats != self._latest or not beats:
            self._latest, self._changed_at = beats, now
        return now - self._changed_at > self._allowed_s


class SilentHosts:
    """Notices, by this host's clock, that all ranks of a host have fallen silent while those of others have not."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Beat, float]] = {}
        self._told: set[str] = set()

    def newly_silent(self, beats: Mapping[int, Beat], now: float) -> list[str]:
        """Hosts without a sign of life for SILENCE_S, each named once until it is heard again."""
        self._seen = {
            rank: self._seen[rank] if rank in self._seen and self._seen[rank][0] == beat else (beat, now)
            for rank, beat in beats.items()
            if beat.exit_code is None
        }
        heard: dict[str, float] = {}
        for beat, at in self._seen.values():
            heard[beat.host] = max(at, heard.get(beat.host, at))
        silent = {host for host, at in heard.items() if now - at > SILENCE_S}
        if silent == set(heard):
            return []  # all of them: the file system does not answer, or the run hangs
        new = sorted(silent - self._told)
        self._told = silent
        return new
