"""The processes below the launcher: run, find, signal and end them."""

import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterable, Sequence
from types import FrameType

import psutil

from launcher.supervision.failure_report import describe_status
from launcher.supervision.terminal import say
from trainer.contract.exit_codes import PASSED_ON, exit_code_after, to_exit_code
from trainer.contract.heartbeat import Heartbeat
from trainer.contract.rendezvous import host_name

END_PATIENCE_S = 10.0
POLL_S = 0.05
CHILD_PATIENCE_S = 10.0


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
    while members := _list_session_members(leader_pids):
        send(members, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        # Not psutil.wait_procs: it would reap the leaders, and their Popen objects would lose the exit status.
        time.sleep(POLL_S)


def _list_session_members(leader_pids: Collection[int]) -> list[psutil.Process]:
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


def run_child(argv: Sequence[str], failed: str = "") -> int:
    """Run `python -m launcher.module ...` in this terminal, such as the data preparation, and return its exit code.

    The code is 128 + N after signal N and 75 after SIGUSR1. Signals are forwarded; the child then has
    `CHILD_PATIENCE_S`, or until a second signal. Prints `failed` if it was killed.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # the child unblocks it once it can handle it
    child = subprocess.Popen(argv, start_new_session=True)
    received: list[tuple[int, float]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
        received.append((number, time.monotonic()))

    before = {number: signal.signal(number, forward) for number in PASSED_ON}
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        while (code := child.poll()) is None:
            if received and (len(received) > 1 or time.monotonic() - received[0][1] > CHILD_PATIENCE_S):
                break
            time.sleep(POLL_S)
    finally:
        end_sessions([child.pid])
        code = child.wait()
        for forwarded, handler in before.items():
            signal.signal(forwarded, handler)
    if received:
        return exit_code_after(received[0][0])
    if code < 0 and failed:
        say(f"{failed}: process {child.pid} on {host_name()} {describe_status(code)}")
    return to_exit_code(code)
