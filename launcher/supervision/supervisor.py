"""Start the ranks of a run, forward signals to them, and choose the exit code of the run.

Ranks of this machine are its own children (launcher/targets/local.py), so the kernel reports how they ended. Ranks
below srun, mpirun and pdsh are not: heartbeats show how ranks ended by themselves, the launcher's log shows which were
killed, and the launcher's exit code 0 counts unless a heartbeat contradicts it.

DeepSpeed's launcher (0.19.8), which pdsh starts on every host, cannot be left to handle a failure alone:
- It gives the other ranks 30 s each, one after another. Here they get FAILURE_PATIENCE_S together, or SAVE_PATIENCE_S
  after a signal.
- It returns the exit code of whichever failed rank it checks first, 256 - N for signal N.
"""

import math
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from launcher.supervision.failure_report import Death, Failure, Fault, log_sizes, report_hang
from launcher.supervision.observer import Observer, name_hosts
from launcher.supervision.processes import (
    end_sessions,
    is_alive,
    list_trees,
    send,
)
from launcher.supervision.remote import Reach
from launcher.supervision.terminal import say
from launcher.targets.local import Command
from trainer.contract.exit_codes import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_RESTART,
    EXIT_USAGE,
    PASSED_ON,
    STOPPED,
    choose_stop_code,
    is_stopped_by_us,
    to_exit_code,
)
from trainer.contract.heartbeat import clear_heartbeats, read_hang, read_heartbeats
from trainer.contract.launcher_process import keep_alive_file
from trainer.contract.restart_record import RestartNote

POLL_S = 0.1
FAILURE_PATIENCE_S = 8.0
SAVE_PATIENCE_S = 60.0  # after a signal: the others may still complete a checkpoint without the failed rank
# An unreachable host never reports the end of its ranks, and ssh waits for it until TCP times out.
END_PATIENCE_S = 22.0
# `timeout` and some schedulers signal both the process and its group: signals this close together count once.
ONE_SIGNAL_S = 0.5
Start = Callable[[IO[bytes]], list[subprocess.Popen[bytes]]]


class State(Enum):
    """What a run is doing, as its launcher knows it."""

    STARTING = auto()
    RUNNING = auto()
    STOPPING = auto()
    """A signal came first: ranks save and end, by the deadline if one of them has ended."""
    FAILING = auto()
    """A failure came first: the other ranks have until the deadline."""


class End(Enum):
    """Why the launcher ends a run, or its watching, before all processes have ended."""

    AT_ONCE = auto()
    """After another signal, or with nothing to save."""
    SILENT = auto()
    OUTLIVED = auto()
    """All ranks have ended, and their launcher has not."""
    UNREACHABLE = auto()
    """Ranks, or their launcher, do not react to being ended."""


class StopSignals:
    """The signals received, and what was done about the first."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.announced_at: float | None = None
        self.is_sent = False
        self._latest = -ONE_SIGNAL_S

    def record(self, number: int, frame: FrameType | None) -> None:
        """Only record the signal; signal handlers must be async-safe."""
        now = time.monotonic()
        if now - self._latest >= ONE_SIGNAL_S:
            self.received.append(number)
        self._latest = now

    @property
    def end_at_once(self) -> bool:
        """Whether another signal asks to stop without a save; after SIGUSR1 a scheduler's SIGTERM is a reminder."""
        first, *others = self.received
        return bool(others) and (first != signal.SIGUSR1 or signal.SIGINT in others)


class Supervisor:
    """One run of a command: its processes, the signals received, and how each rank ended.

    `reach` reaches ranks that this process does not start itself, on this host or others. `start(log)` returns
    processes that write their output to `log`; the default starts `command`.
    """

    def __init__(
        self,
        command: Command,
        logs: Path,
        *,
        hang_timeout_minutes: float = 0.0,
        reach: Reach | None = None,
        start: Start | None = None,
    ) -> None:
        self._start = start or (lambda log: command.start(log, log))
        self.command, self.logs, self.reach = command, logs, reach
        self.state = State.STARTING
        self.end: End | None = None
        self.deadline = math.inf
        """When all ranks are ended, because one has failed or stopped."""
        self.processes: list[subprocess.Popen[bytes]] = []
        """One per rank; with `reach` only the launcher."""
        self.deaths: dict[int, Death] = {}
        self.stop = StopSignals()
        self.fault: Fault | None = None
        self.seen = Observer(logs, command.ranks, reach, hang_timeout_minutes * 60.0)

    @property
    def signals(self) -> list[int]:
        """The signals received."""
        return self.stop.received

    def run(self) -> int:
        """Run to the end, leave no process behind, and return 0, 1 (failed), 2 (usage), 75 (preempted) or 128 + N."""
        self.logs.mkdir(parents=True, exist_ok=True)
        clear_heartbeats(self.logs)
        sizes = log_sizes(self.logs)
        ended = threading.Event()
        handlers = {number: signal.signal(number, self.stop.record) for number in PASSED_ON}
        try:
            with open(self.logs / "launcher.log", "ab") as log:
                log.write(f"== {time.strftime('%Y-%m-%d %H:%M:%S')} {self.command.shell()}\n".encode())
                log.flush()
                self.seen.log.begin()
                self.processes = self._start(log)
            if self.reach is None:
                self.seen.ranks = {rank: psutil.Process(process.pid) for rank, process in enumerate(self.processes)}
            else:
                threading.Thread(target=keep_alive_file, args=(self.logs, ended), daemon=True).start()
            try:
                self._watch()
            finally:
                if self.reach is not None and self.end is not End.UNREACHABLE:
                    self.reach.end(self.processes[0], self.logs)
                end_sessions([process.pid for process in self.processes])
            self._record_deaths()
            codes = [process.wait() for process in self.processes]
            waits = self.end is not End.AT_ONCE and (any(codes) or self.reach is not None)
            if waits and not self.seen.folder.wait_until_readable(self.signals):
                return exit_code_without_folder(codes, self.signals)
            if self.end is End.OUTLIVED:  # its own code only reflects the signal that just ended it
                codes = [beat.exit_code or EXIT_OK for _, beat in sorted(read_heartbeats(self.logs).items())]
            return self._choose_exit_code([EXIT_FAILED] if self.end is End.UNREACHABLE else codes, sizes)
        finally:
            ended.set()
            for number, handler in handlers.items():
                # A stopped run ignores further signals, also while Python itself exits.
                signal.signal(number, signal.SIG_IGN if self.signals else handler)

    def _watch(self) -> None:
        self.state = State.RUNNING
        while self.end is None and any(process.poll() is None for process in self.processes):
            self.seen.look()
            self._record_deaths()
            self.end = self._advance()
            if self.end is None:
                time.sleep(POLL_S)

    def _advance(self) -> End | None:
        if self.signals and self._stop():
            return End.AT_ONCE
        if self.seen.silent_run is not None:
            return End.SILENT
        if self.seen.has_outlived_ranks():
            return End.OUTLIVED
        now = time.monotonic()
        if math.isinf(self.deadline):
            self._set_deadline(now)
        elif now > self.deadline:
            send(list_trees(process for process in self.seen.ranks.values() if is_alive(process)), signal.SIGKILL)
            if self.reach is not None:
                self.reach.end(self.processes[0], self.logs)
                if now - self.deadline > END_PATIENCE_S:
                    return End.UNREACHABLE
        return None

    def _set_deadline(self, now: float) -> None:
        """Give the other ranks a deadline after one failed or stopped: they wait for it in NCCL and see no signal."""
        stopped = self._has_stopped()
        has_failed = any(death.status not in (None, 0, *STOPPED) for death in self.deaths.values())
        if not (stopped or has_failed or self.seen.has_failure):
            return
        saves = bool(self.signals) and not stopped
        if saves:
            say(f"a rank has failed meanwhile; the others have {SAVE_PATIENCE_S:.0f} s to save")
        self.deadline = now + (SAVE_PATIENCE_S if saves else FAILURE_PATIENCE_S)
        self.state = State.STOPPING if self.signals or stopped else State.FAILING
        self.seen.log.text_before_end = self.seen.log.text()

    def _record_deaths(self) -> None:
        for rank, process in self.seen.ranks.items():
            if rank in self.deaths:
                continue
            if self.reach is not None:
                if not is_alive(process):
                    self.deaths[rank] = Death(time.monotonic())
            elif (status := self.processes[rank].poll()) is not None:
                ends = self.end is End.AT_ONCE or time.monotonic() > self.deadline
                by_us = status == -signal.SIGKILL and ends
                self.deaths[rank] = Death(time.monotonic(), status, killed_by_launcher=by_us)

    def _stop(self) -> bool:
        """Forward the first signal to every rank; return True when the time for a clean end is over."""
        stop, now = self.stop, time.monotonic()
        if stop.end_at_once:
            say("stopping at once: unsaved progress is lost" if self.seen.trains else "stopping at once")
            return True
        if stop.announced_at is None:
            first = signal.Signals(self.signals[0])
            again = "Ctrl-C" if first == signal.SIGUSR1 else "once more"
            trains = self.seen.look_for_steps()
            doing = "saving a checkpoint, then stopping" if trains else "stopping, before the first step"
            say(f"{first.name}: {doing}; {again} stops at once")
            stop.announced_at = now
            if self.state is State.RUNNING:
                self.state = State.STOPPING
        stop.is_sent = stop.is_sent or self._send_stop()
        if not self.seen.trains and now - stop.announced_at > FAILURE_PATIENCE_S:
            # A rank that waits for others in native code does not see the signal, and there is nothing to save.
            return not self.seen.look_for_steps()
        return False

    def _send_stop(self) -> bool:
        if self.reach is not None:
            return self.reach.stop(self.processes[0], self.logs)
        first = signal.Signals(self.signals[0])
        send(self.seen.ranks.values(), signal.SIGTERM if first == signal.SIGHUP else first)
        return True

    def _has_stopped(self) -> bool:
        """Return whether a rank ended because of a signal, after saving or with nothing to save.

        Ranks of another launcher count only after a signal to this one: their launcher also ends them by signal.
        """
        codes = {death.status for death in self.deaths.values()}
        if self.reach is not None and self.signals and self.state is not State.FAILING:
            codes |= self.seen.codes
        return not codes.isdisjoint(STOPPED)

    def _choose_exit_code(self, codes: list[int], sizes: dict[str, int]) -> int:
        beats = read_heartbeats(self.logs).values()
        if not any(codes) and (self.reach is None or all(beat.exit_code == 0 for beat in beats)):
            return EXIT_OK
        if hang := read_hang(self.logs) or self.seen.silent_run:
            hang = name_hosts(hang, self.reach)
            self.fault = report_hang(self.logs, sizes, hang, is_reported=self.seen.has_reported_hang)
            return EXIT_FAILED
        self.seen.codes = {beat.exit_code for beat in beats}
        # Errors of ranks that then wait for the stopped one are no failure.
        has_stopped = self._has_stopped()
        waited = {rank for rank, death in self.deaths.items() if has_stopped and death.killed_by_launcher}
        failed = [code for rank, code in enumerate(codes) if code and not is_stopped_by_us(code) and rank not in waited]
        # A signal during the end of a failed run, as with a lost node, does not hide the failure.
        at_once = self.end is End.AT_ONCE
        before_steps = not self.seen.trains and self.state is not State.FAILING
        if self.signals and (not failed or at_once or before_steps or has_stopped):
            return choose_stop_code(self.signals, at_once=at_once)
        stopped = [code for code in codes if code in STOPPED]
        if stopped and not failed:
            return stopped[0]  # another process signalled the ranks, and they have saved
        if EXIT_USAGE in failed:
            return self._report_failure(EXIT_USAGE, sizes)
        return self._report_failure(to_exit_code(failed[0]) if failed else EXIT_OK, sizes)

    def _report_failure(self, code: int, sizes: dict[str, int]) -> int:
        """Report the failure and return 2 for a user error, 128 + N if signal N ended the rank to blame, else 1.

        If ranks ran out of memory and ask for a restart, return 77 without a report.
        """
        if RestartNote.exists(self.logs):
            return EXIT_RESTART
        lost: dict[str, str] = {}
        if self.reach is not None:
            failed, log = self._find_remote_failures(self.reach), self.seen.log.text()
            lost = self.reach.find_lost_hosts(self.seen.log.text_before_end or log, log, read_heartbeats(self.logs))
        else:
            failed = {rank: death for rank, death in self.deaths.items() if death.status != 0}
        failure = Failure(self.logs, sizes, failed, code, lost, self._has_launcher_failed())
        self.fault = failure.report()
        status = self.fault.status
        if code == EXIT_USAGE:
            return EXIT_USAGE
        return 128 - status if status < 0 else EXIT_FAILED

    def _has_launcher_failed(self) -> bool:
        if self.reach is None or self.state is State.FAILING or self.end in (End.OUTLIVED, End.UNREACHABLE):
            return False
        return self.reach.is_launcher_failure(self.processes[0].wait(), self.seen.log.text())

    def _find_remote_failures(self, reach: Reach) -> dict[int, Death]:
        """Return the ranks without a reported success; a killed rank's heartbeats stop before the others'.

        The status of ranks that could not report it themselves is in the launcher's log.
        """
        now, to_monotonic = time.monotonic(), time.monotonic() - time.time()
        beats = read_heartbeats(self.logs)
        reported = reach.parse_statuses(self.seen.log.text(), beats)
        failed: dict[int, Death] = {}
        for rank, beat in beats.items():
            if beat.exit_code != 0:
                death = self.deaths.get(rank, Death(beat.time + to_monotonic))
                status = reported.get(rank) if beat.exit_code is None else beat.exit_code
                # An unknown end while another's is known: this launcher ended it, last.
                failed[rank] = Death(now if reported and status is None else death.when, status)
        return failed


def exit_code_without_folder(codes: Sequence[int], signals: Sequence[int]) -> int:
    """Return a run's exit code from the exit codes of its processes and the signals received."""
    if not any(codes):
        return EXIT_OK
    if signals:
        return choose_stop_code(signals)
    return EXIT_USAGE if EXIT_USAGE in codes else EXIT_FAILED
