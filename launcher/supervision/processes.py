"""The processes below the launcher: which of them are ranks, and how all of them end."""

import os
import signal
import time
from collections.abc import Collection, Iterable

import psutil

from trainer.contract.heartbeat import Heartbeat
from trainer.contract.rank_variables import host_name


def find_noted_ranks(beats: Iterable[Heartbeat]) -> dict[int, psutil.Process]:
    """Rank -> process, of the ranks whose heartbeats say that they run on this host."""
    ranks: dict[int, psutil.Process] = {}
    for beat in beats:
        if beat.host != host_name() or beat.exit_code is not None:
            continue
        try:
            process = psutil.Process(beat.pid)
            # A number that was given again belongs to a process younger than the heartbeat.
            if process.create_time() < beat.time:
                ranks[beat.rank] = process
        except psutil.NoSuchProcess:
            continue
    return ranks


def is_alive(process: psutil.Process) -> bool:
    """Whether the process still runs; one that only waits to be collected by its parent has ended."""
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


def with_children(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The processes and everything below them."""
    found: list[psutil.Process] = []
    for process in processes:
        try:
            found += [*process.children(recursive=True), process]
        except psutil.NoSuchProcess:
            continue
    return found


def end_sessions(leader_pids: Collection[int], *, timeout: float = 10.0) -> None:
    """Kill every process of the sessions that these lead and wait until they are gone.

    By session, not by parent: what a process that has died had started belongs to init, but to its session still.
    """
    deadline = time.monotonic() + timeout
    while members := _sessions(leader_pids):
        send(members, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        # Not psutil.wait_procs: it would collect the leaders' exit status, which belongs to their Popen objects.
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
    """Whether it was halted by SIGSTOP or a debugger."""
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False
