"""Starts a launcher's command, passes signals to the ranks, and returns the exit code that the run deserves.

What DeepSpeed's launcher (0.19.8) does by itself, and why it is not left alone:
- On SIGTERM its front process dies and leaves the ranks running; on Ctrl-C the ranks die in the middle of a step. So it
  gets a session of its own, where the terminal's Ctrl-C does not reach it, and each rank is signalled directly.
- It ends with 0 when its inner process is killed. So 0 is believed only if that process has also written that every
  single rank exited successfully: only a parent learns an exit status, and the line is what this parent leaves of it.
- When a rank fails it gives the others 30 s each, one after the other. They get FAILURE_PATIENCE_S together.
- It passes on the exit code of whichever failed rank it looks at first, 256 - N for signal N. Ranks are therefore
  looked at more often than it does, while the kernel still keeps their status for it.
"""

import math
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil

from launcher.beats import Silence, clear_beats, read_beats, read_hang
from launcher.build_locks import remove_stale_locks
from launcher.command import Command
from launcher.elsewhere import Reach
from launcher.failure import Death, Failure, log_sizes, tell_hang
from launcher.oom import oom_kills
from launcher.processes import (
    end_session,
    exit_status,
    find_noted_ranks,
    find_ranks,
    is_alive,
    is_stopped,
    send,
    with_children,
)
from launcher.terminal import say
from trainer.config.restart_note import EXIT_RESTART, RestartNote

POLL_S = 0.1
FAILURE_PATIENCE_S = 8.0
REMINDER_S = 60.0
LOCKS_EVERY_S = 10.0
# `timeout` and some schedulers signal both the process and its group: what comes so close together was meant once.
ONE_SIGNAL_S = 0.5
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_PREEMPTED = 0, 1, 2, 75
# What ranks say that were told to stop, and have saved or had nothing to save yet.
STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM, EXIT_PREEMPTED}
# One that was ended before it set up its handler, as DeepSpeed's launcher reports it, and others do.
NOT_STARTED = {256 - signal.SIGINT, 256 - signal.SIGTERM, 256 - signal.SIGUSR1, 128 + signal.SIGUSR1}

_SUCCESS = re.compile(r"Process (\d+) exits successfully")
_FAILURE = "Killing subprocess"
# "srun: error: n2: task 1: Exited with exit code 1", "srun: error: n2: tasks 0-7: Killed"; also of lost nodes.
_SRUN_FAILURE = re.compile(r"^srun: error: [^\n]*?(?:task|Node)[^\n]*?(?:exit code (\d+))?$", re.M)


class Supervisor:
    """One run of a command: its processes, the signals that came, and what its log says.

    `reach` is the way to ranks that run on other hosts, or below something other than DeepSpeed's launcher on this one:
    they are known by their heartbeats in `logs`, and the command's exit code 0 is believed if none contradicts it.
    """

    def __init__(
        self, command: Command, logs: Path, *, hang_timeout_minutes: float = 0.0, reach: Reach | None = None
    ) -> None:
        self.command = command
        self.logs = logs
        self.reach = reach
        self.spread = reach is not None
        self.ranks: dict[int, psutil.Process] = {}
        self.deaths: dict[int, Death] = {}
        self.signals: list[int] = []
        self._silence = Silence(logs, hang_timeout_minutes * 60.0)
        self._signalled_at = -ONE_SIGNAL_S
        self._failed_at: float | None = None
        self._stop_sent_at: float | None = None
        self._looked_at = 0.0
        self._locks_due_at = 0.0
        self._is_silent = False
        self._cut_short = False

    def run(self) -> int:
        """Start, wait, and leave nothing behind; returns 0 done, 1 failed, 2 usage, 75 preempted, 128 + signal."""
        self.logs.mkdir(parents=True, exist_ok=True)
        clear_beats(self.logs)
        self.log_path = self.logs / "launcher.log"
        self.old_sizes = log_sizes(self.logs)
        self._oom_kills = oom_kills()
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
                if self.reach is not None:
                    self.reach.end(self.process, self.logs)
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
            self._look_for_ranks()
            for rank, process in self.ranks.items():
                if rank not in self.deaths and not is_alive(process):
                    self.deaths[rank] = Death(time.monotonic(), exit_status(process))
            self._cut_short = bool(self.signals) and self._stop()
            if self._cut_short:
                return
            if self._is_silent:
                return
            self._end_after_failure()
            time.sleep(POLL_S)

    def _look_for_ranks(self) -> None:
        """Once a second what is dear: the tree of processes until all ranks are known, and the heartbeats."""
        now = time.monotonic()
        if now - self._looked_at < 1.0 and self.ranks:
            return
        self._looked_at = now
        if len(self.ranks) < self.command.ranks:
            self.ranks |= find_ranks(self.process.pid)
            if self.spread:
                self.ranks |= find_noted_ranks(read_beats(self.logs).values())
        if now > self._locks_due_at:
            # Another run may be killed while it builds what this one waits for, but only before the first step.
            trains = any(beat.step for beat in read_beats(self.logs).values())
            self._locks_due_at = math.inf if trains else now + LOCKS_EVERY_S
            remove_stale_locks()
        self._is_silent = self._silence.is_complete()
        if read_hang(self.logs) is not None:
            # A rank that was halted must run to write its stack and end.
            send((process for process in self.ranks.values() if is_stopped(process)), signal.SIGCONT)

    def _stop(self) -> bool:
        """Pass the first signal on to every rank; True when the time for a clean end is over."""
        # After SIGUSR1 a scheduler's SIGTERM is no more than a reminder.
        if len(self.signals) > 1 and (self.signals[0] != signal.SIGUSR1 or signal.SIGINT in self.signals[1:]):
            say("stopping at once: what was not saved yet is lost")
            return True
        begun = read_beats(self.logs) if self.spread else len(self.ranks) == self.command.ranks
        if not begun:
            return True  # no training without all ranks, so there is nothing to save
        now = time.monotonic()
        if self._stop_sent_at is None:
            first = signal.Signals(self.signals[0])
            again = "Ctrl-C" if first == signal.SIGUSR1 else "once more"
            say(f"{first.name}: saving a checkpoint, then stopping; {again} stops at once")
            self._send_stop(signal.SIGTERM if first == signal.SIGHUP else first)
            self._stop_sent_at = now
        elif now - self._stop_sent_at > REMINDER_S:
            say("still saving; Ctrl-C stops at once")
            self._stop_sent_at = now
        return False

    def _send_stop(self, number: signal.Signals) -> None:
        """To the ranks of this host; to others by the way that is known, and one of them is enough to stop all."""
        if self.reach is not None:
            self.reach.stop(self.process, self.logs)
        else:
            send(self.ranks.values(), number)

    def _end_after_failure(self) -> None:
        """Once a rank has failed the others wait for it in vain: end them soon, all together."""
        if self._failed_at is None:
            if not self.signals and self._has_failure():
                self._failed_at = time.monotonic()
        elif time.monotonic() - self._failed_at > FAILURE_PATIENCE_S:
            send(with_children(process for process in self.ranks.values() if is_alive(process)), signal.SIGKILL)
            if self.reach is not None:
                self.reach.end(self.process, self.logs)

    def _has_failure(self) -> bool:
        if any(death.status not in (None, 0, *STOPPED) for death in self.deaths.values()):
            return True
        log = self._log()
        return _FAILURE in log or any(int(code or 1) not in STOPPED for code in _SRUN_FAILURE.findall(log))

    def _log(self) -> str:
        """What the launcher below has written in this run."""
        with open(self.log_path, "rb") as log:
            log.seek(self.old_sizes.get(self.log_path.name, 0))
            return log.read().decode(errors="replace")

    def _verdict(self, code: int) -> int:
        successes = {int(pid) for pid in _SUCCESS.findall(self._log())}
        if code == 0 and self._all_succeeded(successes):
            return EXIT_OK
        hang = read_hang(self.logs)
        if hang is None and self._is_silent:
            hang = {"ranks": [0], "text": "no rank gives a sign of life any more: all are stopped, or the host is"}
        if hang is not None:
            tell_hang(self.logs, self.old_sizes, hang)
            return EXIT_FAILED
        if self.signals and (code in STOPPED | NOT_STARTED or self._cut_short):
            preempted = signal.SIGUSR1 in self.signals
            return EXIT_PREEMPTED if preempted else 128 + self.signals[-1 if self._cut_short else 0]
        if code in STOPPED:
            return code  # somebody else signalled the ranks, and they have saved
        return self._failed(code, successes)

    def _failed(self, code: int, successes: set[int]) -> int:
        """Tell why; 2 for a mistake of the user, 128 + signal where one ended the rank to blame, else 1.

        Ranks that ran out of memory and ask for a restart are the caller's business: 77, and nothing told.
        """
        if RestartNote.is_left(self.logs):
            return EXIT_RESTART
        failed = {rank: death for rank, death in self.deaths.items() if self.ranks[rank].pid not in successes}
        if self.reach is not None:
            failed = self._fallen_elsewhere(self.reach, failed)
        elif self.ranks:
            # Ranks are started together; one that was never seen died before the first look.
            failed |= {rank: Death(0.0) for rank in range(self.command.ranks) if rank not in self.ranks}
        struck = None if self._oom_kills is None else (oom_kills() or 0) > self._oom_kills
        status = Failure(self.logs, self.old_sizes, failed, code, struck).tell()
        if code == EXIT_USAGE:
            return EXIT_USAGE
        return 128 - status if status < 0 else EXIT_FAILED

    def _fallen_elsewhere(self, reach: Reach, seen: Mapping[int, Death]) -> dict[int, Death]:
        """Ranks whose heartbeats tell of no success; one that was killed falls silent before the others do.

        How one ended that could not say it itself stands in the launcher's log, unless it was `seen` on this host.
        """
        now, to_monotonic = time.monotonic(), time.monotonic() - time.time()
        beats = read_beats(self.logs)
        told = reach.statuses(self._log(), beats)
        fallen = dict(seen)
        for rank, beat in beats.items():
            if beat.exit_code != 0:
                death = seen.get(rank, Death(beat.time + to_monotonic, beat.exit_code))
                status = told.get(rank) if death.status is None else death.status
                # Nobody knows of its end, but of another's: it was ended here, at last.
                fallen[rank] = Death(now if told and status is None else death.when, status)
        return fallen

    def _all_succeeded(self, successes: set[int]) -> bool:
        if not self.spread:
            return len(successes) == self.command.ranks
        return all(beat.exit_code == 0 for beat in read_beats(self.logs).values())


def run_child(argv: Sequence[str], *, quiet: bool = False) -> int:
    """Run a command on this terminal, pass signals on, and return its exit code (128 + signal if one ended it).

    `quiet` drops its stdout; stderr, with progress and errors, stays. SIGUSR1 ends it like SIGTERM, with 75.
    """
    child = subprocess.Popen(argv, stdout=subprocess.DEVNULL if quiet else None, start_new_session=True)
    preempted = False

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal preempted
        preempted = preempted or number == signal.SIGUSR1
        child.send_signal(signal.SIGTERM if number == signal.SIGUSR1 else number)

    before = {number: signal.signal(number, forward) for number in PASSED_ON}
    try:
        code = child.wait()
    finally:
        for passed_on, handler in before.items():
            signal.signal(passed_on, handler)
    if preempted and code:
        return EXIT_PREEMPTED
    return code if code >= 0 else 128 - code
