"""Run, find, signal and kill the processes that the launcher starts."""

import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from types import FrameType

import psutil

from launcher.supervision.failure_report import describe_status
from launcher.supervision.terminal import log
from trainer.contract.exit_codes import FORWARDED_SIGNALS, get_signal_exit_code, to_exit_code
from trainer.contract.heartbeat import Heartbeat
from trainer.contract.rendezvous import get_host_name

END_TIMEOUT_S = 10.0
POLL_S = 0.05
CHILD_TIMEOUT_S = 10.0


def find_local_ranks(beats: Iterable[Heartbeat]) -> dict[int, psutil.Process]:
    ranks: dict[int, psutil.Process] = {}
    for beat in beats:
        if beat.host != get_host_name() or beat.exit_code is not None:
            continue
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(beat.pid)
            # If the PID was reused, its process is younger than the heartbeat.
            if process.create_time() < beat.time:
                ranks[beat.rank] = process
    return ranks


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process is running and not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def send_signal(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def list_process_trees(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    tree: list[psutil.Process] = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            tree += [*process.children(recursive=True), process]
    return tree


def kill_sessions(leader_pids: Collection[int]) -> None:
    """Kill all processes in the sessions of these leaders, and wait for them to exit.

    Waits at most END_TIMEOUT_S. Orphans of a dead leader have init as their parent, but stay in its session.
    """
    deadline = time.monotonic() + END_TIMEOUT_S
    while members := _list_session_members(leader_pids):
        send_signal(members, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        # psutil.wait_procs would reap the leaders, and their Popen objects would lose the exit status.
        time.sleep(POLL_S)


def _list_session_members(leader_pids: Collection[int]) -> list[psutil.Process]:
    members: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getsid(process.pid) in leader_pids and is_alive(process):
                members.append(process)
    return members


def is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


def run_child(argv: Sequence[str], failure_message: str = "") -> int:
    """Run `python -m launcher.module ...` in this terminal, and return its exit code.

    Forwards signals. Kills the child on a second signal, or CHILD_TIMEOUT_S after the first. After a signal,
    the exit code is 128 plus the number of the first one, or 75 for SIGUSR1. If a signal kills the child, but
    this process received none, prints a message that begins with `failure_message`, if given.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # the child unblocks it
    child = subprocess.Popen(argv, start_new_session=True)
    received: list[tuple[int, float]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
        received.append((number, time.monotonic()))

    handlers = {number: signal.signal(number, forward) for number in FORWARDED_SIGNALS}
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        while (code := child.poll()) is None:
            if received and (len(received) > 1 or time.monotonic() - received[0][1] > CHILD_TIMEOUT_S):
                break
            time.sleep(POLL_S)
    finally:
        kill_sessions([child.pid])
        code = child.wait()
        for forwarded, handler in handlers.items():
            signal.signal(forwarded, handler)
    if received:
        return get_signal_exit_code(received[0][0])
    if code < 0 and failure_message:
        log(f"{failure_message}: process {child.pid} on {get_host_name()} {describe_status(code)}")
    return to_exit_code(code)
