"""The processes below the launcher: which of them are ranks, and how all of them end."""

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from launcher.beats import Beat, own_host


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


def find_noted_ranks(beats: Iterable[Beat]) -> dict[int, psutil.Process]:
    """Rank -> process, of the ranks whose heartbeats say that they run on this host."""
    ranks: dict[int, psutil.Process] = {}
    for beat in beats:
        if beat.host != own_host() or beat.exit_code is not None:
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


def exit_status(process: psutil.Process) -> int | None:
    """How an ended process ended, as `subprocess` says it (negative for a signal), until its parent has collected it.

    A parent that polls once a second leaves us that long: DeepSpeed's launcher reports one rank's status, and not
    always the first one's.
    """
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] != "Z":
        return None
    return os.waitstatus_to_exitcode(int(fields[-1]))


def is_stopped(process: psutil.Process) -> bool:
    """Whether it was halted by SIGSTOP or a debugger."""
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False
