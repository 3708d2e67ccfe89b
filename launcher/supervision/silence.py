"""Heartbeats of a run that have stopped: of all its ranks, or of those of one host."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.supervision.remote import Reach
from trainer.contract.heartbeat import VERDICT_FILE, Heartbeat, read_heartbeats

# Longer than any interval between two heartbeats, by far.
SILENCE_S = 60.0


def read_hang(logs: Path) -> Mapping[str, Any] | None:
    """What the ranks of a run that got nowhere have agreed on: `ranks` that are behind, and `text`."""
    try:
        found: Mapping[str, Any] = json.loads((logs / VERDICT_FILE).read_text())
        return found
    except (OSError, ValueError):
        return None


def silent_run(ranks: int, beats: Mapping[int, Heartbeat]) -> Mapping[str, Any]:
    """What is told, as `read_hang` gives it, where no rank is left that could tell it.

    Ranks that have left nothing are to blame: others can wait for them in MPI_Init, where a process has no threads.
    """
    unheard = [rank for rank in range(ranks) if rank not in beats]
    if not beats or not unheard:
        return {"ranks": [0], "text": "no rank gives a sign of life any more: all are stopped, or the host is"}
    text = "; ".join(f"rank {rank} has given no sign of life since it was started" for rank in unheard)
    return {"ranks": unheard, "text": f"{text}; the others give none any more"}


def name_hosts(hang: Mapping[str, Any], reach: Reach | None) -> Mapping[str, Any]:
    """With the host of a rank that has not begun, which the other ranks may not know."""
    text = str(hang["text"])
    for rank in hang["ranks"]:
        host = reach.host_of(rank) if reach is not None else ""
        if host:
            text = text.replace(f"rank {rank} has given no", f"rank {rank} on {host} has given no")
    return {**hang, "text": text}


class Silence:
    """Notices that all heartbeats have stopped, which no rank is left to notice."""

    def __init__(self, logs: Path, hang_timeout_s: float) -> None:
        self._logs = logs
        self._allowed_s = 1.5 * hang_timeout_s + SILENCE_S
        self._watches = hang_timeout_s > 0
        self._latest: dict[int, Heartbeat] = {}
        self._changed_at = time.monotonic()

    def is_complete(self) -> bool:
        """True once no rank that has begun and not ended has given a sign of life for 1.5 hang_timeout and a minute."""
        if not self._watches:
            return False
        beats = {rank: beat for rank, beat in read_heartbeats(self._logs).items() if beat.exit_code is None}
        now = time.monotonic()
        if beats != self._latest or not beats:
            self._latest, self._changed_at = beats, now
        return now - self._changed_at > self._allowed_s


class SilentHosts:
    """Notices, by this host's clock, that all ranks of a host have fallen silent while those of others have not."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Heartbeat, float]] = {}
        self._told: set[str] = set()

    def newly_silent(self, beats: Mapping[int, Heartbeat], now: float) -> list[str]:
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
