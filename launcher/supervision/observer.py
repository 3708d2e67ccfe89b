"""Observe a run once a second: its heartbeats, the log of srun, mpirun or pdsh, and its folder."""

import math
import os
import signal
import time
from collections.abc import Mapping, Sized
from pathlib import Path

import psutil

from launcher.supervision.build_locks import remove_stale_locks
from launcher.supervision.processes import find_local_ranks, is_stopped, send_signal
from launcher.supervision.remote import LauncherLog, RemoteRanks
from launcher.supervision.terminal import log
from trainer.contract.heartbeat import HangReport, Heartbeat, read_hang_report, read_heartbeats
from trainer.contract.rendezvous import get_host_name

LOCK_CHECK_INTERVAL_S = 10.0
# srun waits forever for a node if the slurmstepd there was killed after its rank had exited.
LAUNCHER_EXIT_S = 35.0  # longer than a failed run's ranks are given to exit
# Far longer than any interval between two heartbeats.
SILENCE_S = 60.0
FOLDER_WAIT_S, FOLDER_WAIT_AFTER_SIGNAL_S = 120.0, 5.0
"""How long to wait for an unreadable folder after all ranks have exited."""
FOLDER_POLL_S = 0.5
_RUN_PREFIXES = ("launcher.log", "heartbeat-")


def diagnose_silence(ranks: int, beats: Mapping[int, Heartbeat]) -> HangReport:
    """Diagnose a run in which all ranks have stopped sending heartbeats.

    Ranks that never sent a heartbeat are reported as the cause: the other ranks may be waiting for them in MPI_Init.
    """
    never_seen = [rank for rank in range(ranks) if rank not in beats]
    if not beats or not never_seen:
        return HangReport([0], "all ranks have stopped sending heartbeats; their processes or hosts have stopped")
    text = "; ".join(f"rank {rank} has sent no heartbeat since it was started" for rank in never_seen)
    return HangReport(never_seen, f"{text}; the others have stopped sending heartbeats")


def add_host_names(hang: HangReport, remote: RemoteRanks | None) -> HangReport:
    """Add the host of each rank to the hang message, because ranks may not know each other's hosts."""
    text = hang.text
    for rank in hang.ranks:
        host = get_host_name() if remote is None else remote.find_host(rank)
        if host:
            text = text.replace(f"rank {rank} has ", f"rank {rank} on {host} has ")
    return HangReport(hang.ranks, text)


class FolderWatch:
    """Reports when `logs` becomes unreadable, for example because its file server is down, and when it recovers."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._is_unreadable = False

    def is_readable(self) -> bool:
        """Return whether the folder can be listed and belongs to this run."""
        problem = self._find_problem()
        if problem and not self._is_unreadable:
            log(f"the run's folder cannot be read: {problem}")
        elif self._is_unreadable and not problem:
            log("the run's folder can be read again")
        self._is_unreadable = bool(problem)
        return not problem

    def _find_problem(self) -> str:
        try:
            names = os.listdir(self._logs)  # listing contacts the file server; attributes may be cached
        except OSError as error:
            return str(error)
        # If the disk is not mounted, the lock's thread creates a folder that contains only the lock.
        has_run = any(name.startswith(_RUN_PREFIXES) for name in names)
        return "" if has_run else f"{self._logs} has no files of this run"

    def wait_until_readable(self, signals: Sized) -> bool:
        """Wait until the folder is readable, and return whether it is.

        Stops waiting after a timeout or when another signal arrives. The folder is needed to read the ranks' state
        and to find complete checkpoints.
        """
        if self.is_readable():
            return True
        seconds, received = FOLDER_WAIT_AFTER_SIGNAL_S if signals else FOLDER_WAIT_S, len(signals)
        log(f"the run has ended; waiting up to {seconds:.0f} s for its folder")
        deadline = time.monotonic() + seconds
        while not self.is_readable():
            if len(signals) > received:
                return False
            if time.monotonic() > deadline:
                log(
                    f"{self._logs.parent} still cannot be read; when it can, check its logs for the cause, and "
                    "resume with training.resume_from_checkpoint=auto"
                )
                return False
            time.sleep(FOLDER_POLL_S)
        return True


class Observer:
    def __init__(self, logs: Path, world_size: int, remote: RemoteRanks | None, hang_timeout_s: float) -> None:
        self.folder, self.log = FolderWatch(logs), LauncherLog(logs / "launcher.log")
        self.ranks: dict[int, psutil.Process] = {}
        """Processes of the known ranks on this host."""
        self.has_begun_step = False
        """Whether a rank has begun a step."""
        self.exit_codes: set[int | None] = set()
        """Exit codes in the heartbeats; None for ranks that have not exited."""
        self.has_failure = False
        """Whether the ranks' launcher has reported a failed rank or host."""
        self.silence: HangReport | None = None
        self.has_reported_hang = False
        self._logs, self._world_size, self._remote = logs, world_size, remote
        self._unfinished: dict[int, Heartbeat] = {}
        self._changed_at = time.monotonic()
        self._silence_s = 1.5 * hang_timeout_s + SILENCE_S if hang_timeout_s else math.inf
        self._polled_at = self._locks_due_at = 0.0
        self._all_ended_at: float | None = None

    def poll(self) -> None:
        """Update the run's state from heartbeats and the launcher's log, at most once a second.

        Also removes stale build locks before the first step, and reports hung ranks.
        """
        now = time.monotonic()
        if now - self._polled_at < 1.0:
            return
        self._polled_at = now
        if not self.folder.is_readable():
            self._changed_at = now
            return
        beats = read_heartbeats(self._logs)
        self.has_begun_step |= any(beat.step for beat in beats.values())
        self.exit_codes = {beat.exit_code for beat in beats.values()}
        if self._remote is not None:
            self.ranks = find_local_ranks(beats.values()) | self.ranks
            self.has_failure = self.has_failure or self.log.has_failure()
            ended = len(beats) == self._world_size and None not in self.exit_codes
            self._all_ended_at = (self._all_ended_at or now) if ended else None
        if now > self._locks_due_at:
            # Before its first step, this run may be waiting for a build that was killed.
            self._locks_due_at = math.inf if self.has_begun_step else now + LOCK_CHECK_INTERVAL_S
            remove_stale_locks()
        unfinished = {rank: beat for rank, beat in beats.items() if beat.exit_code is None}
        if unfinished != self._unfinished or not unfinished:
            self._unfinished, self._changed_at = unfinished, now
        if now - self._changed_at > self._silence_s:
            # Diagnose before terminating mpirun, which resumes stopped ranks.
            self.silence = diagnose_silence(self._world_size, beats)
        if (hang := read_hang_report(self._logs)) is not None:
            if not self.has_reported_hang:
                self.has_reported_hang = True  # now, because the launcher may wait forever for an unreachable host
                log(f"the run failed: {add_host_names(hang, self._remote).text}")
            # Let stopped ranks write their stacks and exit. Ranks without heartbeats would start training instead.
            halted = (process for rank, process in self.ranks.items() if rank in beats and is_stopped(process))
            send_signal(halted, signal.SIGCONT)

    def check_for_steps(self) -> bool:
        self.has_begun_step |= any(beat.step for beat in read_heartbeats(self._logs).values())
        return self.has_begun_step

    def has_outlived_ranks(self) -> bool:
        """Return whether the launcher outlived its ranks by LAUNCHER_EXIT_S seconds, and print a message if so."""
        if self._all_ended_at is None or time.monotonic() - self._all_ended_at < LAUNCHER_EXIT_S:
            return False
        log(f"all ranks exited {LAUNCHER_EXIT_S:.0f} s ago, but their launcher still waits; terminating it")
        return True
