"""The processes below the launcher: which of them are ranks, and how all of them end."""

import os
import signal
import time
from collections.abc import Iterable

import psutil


def find_ranks(root_pid: int) -> dict[int, psutil.Process]:
    """Rank -> process, among the descendants of `root_pid`.

    A rank is a process that has RANK in its environment while its parent has not: DeepSpeed's launcher sets it, and the
    rank's own children (data loaders, compilers) inherit it.
    """
    ranks: dict[int, psutil.Process] = {}
    try:
        descendants = psutil.Process(root_pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return ranks
    for process in descendants:
        try:
            rank = process.environ().get("RANK")
            parent = process.parent()
            # A fork that has not reached its exec yet still shows its parent's environment and is found next time.
            if rank is not None and parent is not None and "RANK" not in parent.environ():
                ranks[int(rank)] = process
        except (psutil.Error, OSError, ValueError):
            continue  # ended between being listed and being looked at
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


def end_session(leader_pid: int, *, timeout: float = 10.0) -> None:
    """Kill every process of the session that `leader_pid` leads and wait until they are gone.

    By session, not by parent: the ranks of a launcher that has died belong to init, but to their session still.
    """
    deadline = time.monotonic() + timeout
    while members := _session(leader_pid):
        send(members, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        # Not psutil.wait_procs: it would collect the leader's exit status, which belongs to its Popen object.
        time.sleep(0.05)


def _session(leader_pid: int) -> list[psutil.Process]:
    members: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader_pid and is_alive(process):
                members.append(process)
        except (OSError, psutil.Error):
            continue
    return members
