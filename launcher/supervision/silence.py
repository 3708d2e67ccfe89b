"""Detect that the heartbeats of all ranks have stopped."""

import time
from collections.abc import Mapping
from pathlib import Path

from launcher.supervision.remote import Reach
from trainer.contract.heartbeat import Hang, Heartbeat, read_heartbeats

# Far longer than any interval between two heartbeats.
SILENCE_S = 60.0


def diagnose_silence(ranks: int, beats: Mapping[int, Heartbeat]) -> Hang:
    """Diagnose a run in which no rank can report anything.

    Blame ranks without any heartbeat: the others may wait for them in MPI_Init, before the watchdog thread exists.
    """
    unheard = [rank for rank in range(ranks) if rank not in beats]
    if not beats or not unheard:
        return Hang([0], "no rank sends heartbeats any more: all ranks, or their host, are stopped")
    text = "; ".join(f"rank {rank} has sent no heartbeat since it was started" for rank in unheard)
    return Hang(unheard, f"{text}; the others send none any more")


def name_hosts(hang: Hang, reach: Reach | None) -> Hang:
    """Add the host of each rank without heartbeats, which the other ranks may not know."""
    text = hang.text
    for rank in hang.ranks:
        host = reach.find_host(rank) if reach is not None else ""
        if host:
            text = text.replace(f"rank {rank} has ", f"rank {rank} on {host} has ")
    return Hang(hang.ranks, text)


class Silence:
    """Detector of a run in which all heartbeats have stopped, so that no rank can report it."""

    def __init__(self, logs: Path, hang_timeout_s: float) -> None:
        self._logs = logs
        self._allowed_s = 1.5 * hang_timeout_s + SILENCE_S
        self._watches = hang_timeout_s > 0
        self._latest: dict[int, Heartbeat] = {}
        self._changed_at = time.monotonic()

    def has_timed_out(self) -> bool:
        """Return whether no unfinished rank has sent a heartbeat for 1.5 hang_timeout plus a minute."""
        if not self._watches:
            return False
        beats = {rank: beat for rank, beat in read_heartbeats(self._logs).items() if beat.exit_code is None}
        now = time.monotonic()
        if beats != self._latest or not beats:
            self._latest, self._changed_at = beats, now
        return now - self._changed_at > self._allowed_s
