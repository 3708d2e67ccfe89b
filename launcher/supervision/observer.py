"""What the launcher sees of a run once a second: heartbeats, the log of the ranks' launcher, the run's folder."""

import math
import os
import signal
import time
from collections.abc import Mapping, Sized
from pathlib import Path

import psutil

from launcher.supervision.build_locks import remove_stale_locks
from launcher.supervision.processes import find_local_ranks, is_stopped, send
from launcher.supervision.remote import LauncherLog, Reach
from launcher.supervision.terminal import say
from trainer.contract.heartbeat import Hang, Heartbeat, read_hang, read_heartbeats
from trainer.contract.rendezvous import host_name

LOCKS_EVERY_S = 10.0
# srun waits forever for a node if the slurmstepd there was killed after its rank had ended.
OUTLIVED_S = 35.0  # longer than a failed run's patience
# Far longer than any interval between two heartbeats.
SILENCE_S = 60.0
RETURN_S, STOP_S = 120.0, 5.0
"""How long to wait for the run's folder after all ranks have ended: normally, and after a signal to stop."""
FOLDER_POLL_S = 0.5
_RUN_PREFIXES = ("launcher.log", "heartbeat-")


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
        host = host_name() if reach is None else reach.find_host(rank)
        if host:
            text = text.replace(f"rank {rank} has ", f"rank {rank} on {host} has ")
    return Hang(hang.ranks, text)


class FolderWatch:
    """Reports when `logs` cannot be read for a while: its file server does not answer, or was remounted."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._is_unreadable = False

    def is_readable(self) -> bool:
        """Return whether the folder can be listed and belongs to this run."""
        problem = self._find_problem()
        if problem and not self._is_unreadable:
            say(f"the run's folder cannot be read: {problem}")
        elif self._is_unreadable and not problem:
            say("the run's folder can be read again")
        self._is_unreadable = bool(problem)
        return not problem

    def _find_problem(self) -> str:
        try:
            names = os.listdir(self._logs)  # asks the file server; cached attributes may be a second old
        except OSError as error:
            return str(error)
        # Where nothing is mounted, the thread that holds the lock creates a folder with only the lock in it.
        return (
            "" if any(name.startswith(_RUN_PREFIXES) for name in names) else f"nothing of this run is in {self._logs}"
        )

    def wait_until_readable(self, signals: Sized) -> bool:
        """Wait until the folder is readable, at most until another signal; return whether it is.

        Without it neither the state of the ranks nor the complete checkpoints are known.
        """
        if self.is_readable():
            return True
        seconds, received = STOP_S if signals else RETURN_S, len(signals)
        say(f"the run has ended; waiting up to {seconds:.0f} s for its folder")
        deadline = time.monotonic() + seconds
        while not self.is_readable():
            if len(signals) > received:
                return False
            if time.monotonic() > deadline:
                say(
                    f"{self._logs.parent} still cannot be read, and its logs say why the run ended; once it can, start "
                    "the run with training.resume_from_checkpoint=auto"
                )
                return False
            time.sleep(FOLDER_POLL_S)
        return True


class Observer:
    """Reads the state of the ranks."""

    def __init__(self, logs: Path, count: int, reach: Reach | None, hang_timeout_s: float) -> None:
        """`count` is the number of ranks; those that another launcher started also have its `log`."""
        self.folder, self.log = FolderWatch(logs), LauncherLog(logs / "launcher.log")
        self.ranks: dict[int, psutil.Process] = {}
        """Known ranks of this host."""
        self.trains = False
        """Whether a rank has begun a step."""
        self.codes: set[int | None] = set()
        """Exit codes in the heartbeats; None of ranks that have not ended."""
        self.has_failure = False
        """Whether the launcher of the ranks reports one."""
        self.silent_run: Hang | None = None
        self.has_reported_hang = False
        self._logs, self._count, self._reach = logs, count, reach
        self._unfinished: dict[int, Heartbeat] = {}
        self._changed_at = time.monotonic()
        self._silence_s = 1.5 * hang_timeout_s + SILENCE_S if hang_timeout_s else math.inf
        self._looked_at = self._locks_due_at = 0.0
        self._all_ended_at: float | None = None

    def look(self) -> None:
        """Read the heartbeats and the launcher's log, at most once a second."""
        now = time.monotonic()
        if now - self._looked_at < 1.0:
            return
        self._looked_at = now
        if not self.folder.is_readable():
            self._changed_at = now
            return
        beats = read_heartbeats(self._logs)
        self.trains |= any(beat.step for beat in beats.values())
        self.codes = {beat.exit_code for beat in beats.values()}
        if self._reach is not None:
            self.ranks = find_local_ranks(beats.values()) | self.ranks
            self.has_failure = self.has_failure or self.log.has_failure()
            ended = len(beats) == self._count and None not in self.codes
            self._all_ended_at = (self._all_ended_at or now) if ended else None
        if now > self._locks_due_at:
            # Before the first step this run may wait for a build of another run that gets killed.
            self._locks_due_at = math.inf if self.trains else now + LOCKS_EVERY_S
            remove_stale_locks()
        unfinished = {rank: beat for rank, beat in beats.items() if beat.exit_code is None}
        if unfinished != self._unfinished or not unfinished:
            self._unfinished, self._changed_at = unfinished, now
        if now - self._changed_at > self._silence_s:
            # Before mpirun is ended, which resumes stopped ranks.
            self.silent_run = diagnose_silence(self._count, beats)
        if (hang := read_hang(self._logs)) is not None:
            if not self.has_reported_hang:
                self.has_reported_hang = True  # now, because the launcher of an unreachable host may not return
                say(f"the run failed: {name_hosts(hang, self._reach).text}")
            # A stopped rank must run to write its stack and end; one without heartbeats would only start training.
            halted = (process for rank, process in self.ranks.items() if rank in beats and is_stopped(process))
            send(halted, signal.SIGCONT)

    def look_for_steps(self) -> bool:
        """Return whether a rank has begun a step, by its newest heartbeat."""
        self.trains |= any(beat.step for beat in read_heartbeats(self._logs).values())
        return self.trains

    def has_outlived_ranks(self) -> bool:
        """Return and report whether the ranks' launcher still runs OUTLIVED_S after all of them reported their end."""
        if self._all_ended_at is None or time.monotonic() - self._all_ended_at < OUTLIVED_S:
            return False
        say(f"all ranks ended {OUTLIVED_S:.0f} s ago, but their launcher still waits; ending it")
        return True
