"""Starts the `deepspeed` command, passes signals to the ranks, and returns the exit code that the run deserves.

What DeepSpeed's launcher (0.19.8) does by itself, and why it is not left alone:
- On SIGTERM its front process dies and leaves the ranks running; on Ctrl-C the ranks die in the middle of a step. So it
  gets a session of its own, where the terminal's Ctrl-C does not reach it, and each rank is signalled directly.
- It ends with 0 when its inner process is killed. So 0 is believed only if that process has also written that every
  single rank exited successfully: only a parent learns an exit status, and the line is what this parent leaves of it.
- When a rank fails it gives the others 30 s each, one after the other. They get FAILURE_PATIENCE_S together.
"""

import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import psutil

from launcher.command import Command
from launcher.failure import log_sizes, tell_failure
from launcher.processes import end_session, find_ranks, is_alive, send, with_children
from launcher.terminal import say

POLL_S = 0.2
FAILURE_PATIENCE_S = 8.0
REMINDER_S = 60.0
# `timeout` and some schedulers signal both the process and its group: what comes so close together was meant once.
ONE_SIGNAL_S = 0.5
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
# A rank that has saved says 128 + signal; one that was ended before it set up its handler shows as 256 - signal.
SAVED = {128 + signal.SIGINT, 128 + signal.SIGTERM}
NOT_STARTED = {256 - signal.SIGINT, 256 - signal.SIGTERM}

_SUCCESS = re.compile(r"Process (\d+) exits successfully")
_FAILURE = "Killing subprocess"


class Supervisor:
    """One run of a command: its processes, the signals that came, and what its log says."""

    def __init__(self, command: Command, logs: Path) -> None:
        self.command = command
        self.logs = logs
        self.ranks: dict[int, psutil.Process] = {}
        self.deaths: dict[int, float] = {}
        self.signals: list[int] = []
        self._signalled_at = -ONE_SIGNAL_S
        self._failed_at: float | None = None
        self._stop_sent_at: float | None = None

    def run(self) -> int:
        """Start, wait, and leave nothing behind; returns 0 done, 1 failed, 2 usage, 128 + signal when stopped."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self.log_path = self.logs / "launcher.log"
        self.old_sizes = log_sizes(self.logs)
        before = {number: signal.signal(number, self._note) for number in PASSED_ON}
        try:
            with open(self.log_path, "ab") as log:
                log.write(f"== {time.strftime('%Y-%m-%d %H:%M:%S')} {self.command.shell()}\n".encode())
                log.flush()
                self.process = subprocess.Popen(
                    self.command.argv,
                    env=self.command.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            try:
                self._watch()
            finally:
                end_session(self.process.pid)
            return self._verdict(self.process.wait())
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Only remembered here: a handler may interrupt anything.
        now = time.monotonic()
        if now - self._signalled_at >= ONE_SIGNAL_S:
            self.signals.append(number)
        self._signalled_at = now

    def _watch(self) -> None:
        while self.process.poll() is None:
            if len(self.ranks) < self.command.ranks:
                self.ranks |= find_ranks(self.process.pid)
            for rank, process in self.ranks.items():
                if rank not in self.deaths and not is_alive(process):
                    self.deaths[rank] = time.monotonic()
            if self.signals and self._stop():
                return
            self._end_after_failure()
            time.sleep(POLL_S)

    def _stop(self) -> bool:
        """Pass the first signal on to every rank; True when the time for a clean end is over."""
        if len(self.signals) > 1:
            say("stopping at once: what was not saved yet is lost")
            return True
        if len(self.ranks) < self.command.ranks:
            return True  # no training without all ranks, so there is nothing to save
        now = time.monotonic()
        if self._stop_sent_at is None:
            say(f"{signal.Signals(self.signals[0]).name}: saving a checkpoint, then stopping; once more stops at once")
            send(self.ranks.values(), signal.SIGINT if self.signals[0] == signal.SIGINT else signal.SIGTERM)
            self._stop_sent_at = now
        elif now - self._stop_sent_at > REMINDER_S:
            say("still saving; Ctrl-C stops at once")
            self._stop_sent_at = now
        return False

    def _end_after_failure(self) -> None:
        """Once a rank has failed the others wait for it in vain: end them soon, all together."""
        if self._failed_at is None:
            if not self.signals and _FAILURE in self._log():
                self._failed_at = time.monotonic()
        elif time.monotonic() - self._failed_at > FAILURE_PATIENCE_S:
            send(with_children(process for process in self.ranks.values() if is_alive(process)), signal.SIGKILL)

    def _log(self) -> str:
        """What DeepSpeed's launcher has written in this run."""
        with open(self.log_path, "rb") as log:
            log.seek(self.old_sizes.get(self.log_path.name, 0))
            return log.read().decode(errors="replace")

    def _verdict(self, code: int) -> int:
        successes = {int(pid) for pid in _SUCCESS.findall(self._log())}
        if code == 0 and len(successes) == self.command.ranks:
            return EXIT_OK
        if len(self.signals) > 1:
            return 128 + self.signals[-1]
        if self.signals and (code in SAVED | NOT_STARTED or len(self.ranks) < self.command.ranks):
            return 128 + self.signals[0]
        if code in SAVED:
            return code  # somebody else signalled the ranks, and they have saved
        failed = {rank: when for rank, when in self.deaths.items() if self.ranks[rank].pid not in successes}
        if self.ranks:
            # Ranks are started together; one that was never seen died before the first look.
            failed |= {rank: 0.0 for rank in range(self.command.ranks) if rank not in self.ranks}
        tell_failure(self.logs, self.old_sizes, failed, code)
        return EXIT_USAGE if code == EXIT_USAGE else EXIT_FAILED


def run_child(argv: Sequence[str], *, quiet: bool = False) -> int:
    """Run a command on this terminal, pass signals on, and return its exit code (128 + signal if one ended it).

    `quiet` drops its stdout; stderr, with progress and errors, stays.
    """
    child = subprocess.Popen(argv, stdout=subprocess.DEVNULL if quiet else None, start_new_session=True)

    def forward(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in PASSED_ON}
    try:
        code = child.wait()
    finally:
        for passed_on, handler in before.items():
            signal.signal(passed_on, handler)
    return code if code >= 0 else 128 - code
