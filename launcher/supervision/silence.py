"""Heartbeats of a run that have stopped: of all its ranks, or of those of one host."""

import time
from collections.abc import Mapping
from pathlib import Path

from launcher.supervision.remote import Reach
from trainer.contract.heartbeat import Hang, Heartbeat, read_heartbeats

# Longer than any interval between two heartbeats, by far.
SILENCE_S = 60.0


def silent_run(ranks: int, beats: Mapping[int, Heartbeat]) -> Hang:
    """Return the verdict on a run in which no rank is left that could give it.

    Ranks that have left nothing are to blame: others can wait for them in MPI_Init, where a process has no threads.
    """
    unheard = [rank for rank in range(ranks) if rank not in beats]
    if not beats or not unheard:
        return Hang([0], "no rank gives a sign of life any more: all are stopped, or the host is")
    text = "; ".join(f"rank {rank} has given no sign of life since it was started" for rank in unheard)
    return Hang(unheard, f"{text}; the others give none any more")


def name_hosts(hang: Hang, reach: Reach | None) -> Hang:
    """Add the host of a rank that has not begun, which the other ranks may not know."""
    text = hang.text
    for rank in hang.ranks:
        host = reach.host_of(rank) if reach is not None else ""
        if host:
            text = text.replace(f"rank {rank} has given no", f"rank {rank} on {host} has given no")
    return Hang(hang.ranks, text)


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
