"""Find, signal and end the processes below the launcher."""

import os
import signal
import time
from collections.abc import Collection, Iterable

import psutil

from trainer.contract.heartbeat import Heartbeat
from trainer.contract.rank_variables import host_name

END_PATIENCE_S = 10.0


def find_local_ranks(beats: Iterable[Heartbeat]) -> dict[int, psutil.Process]:
    """Return rank -> process for the ranks that run on this host according to their heartbeats."""
    ranks: dict[int, psutil.Process] = {}
    for beat in beats:
        if beat.host != host_name() or beat.exit_code is not None:
            continue
        try:
            process = psutil.Process(beat.pid)
            # A reused pid belongs to a process younger than the heartbeat.
            if process.create_time() < beat.time:
                ranks[beat.rank] = process
        except psutil.NoSuchProcess:
            continue
    return ranks


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process runs and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def send(processes: Iterable[psutil.Process], number: int) -> None:
    """Send a signal to each process that still exists."""
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def list_trees(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes and all their descendants."""
    found: list[psutil.Process] = []
    for process in processes:
        try:
            found += [*process.children(recursive=True), process]
        except psutil.NoSuchProcess:
            continue
    return found


def end_sessions(leader_pids: Collection[int]) -> None:
    """Kill every process of the sessions with these leaders and wait until they have ended.

    By session, not by parent: orphans of a dead process belong to init, but still to its session.
    """
    deadline = time.monotonic() + END_PATIENCE_S
    while members := _sessions(leader_pids):
        send(members, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        # Not psutil.wait_procs: it would reap the leaders, and their Popen objects would lose the exit status.
        time.sleep(0.05)


def _sessions(leader_pids: Collection[int]) -> list[psutil.Process]:
    members: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) in leader_pids and is_alive(process):
                members.append(process)
        except (OSError, psutil.Error):
            continue
    return members


def is_stopped(process: psutil.Process) -> bool:
    """Return whether SIGSTOP or a debugger has stopped the process."""
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False
