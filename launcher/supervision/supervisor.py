"""Start the ranks of a run, forward signals to them, and choose the run's exit code.

Ranks on this machine are children of this process (launcher/targets/local.py), so the kernel reports how they exited.
For ranks started by srun, mpirun or pdsh, heartbeats show how they exited, the launcher's log shows which were killed,
and exit code 0 from the launcher means success unless a heartbeat contradicts it.

DeepSpeed's launcher (0.19.8), which pdsh starts on every host, does not handle failures well enough:
- It waits up to 30 s for each of the other ranks in turn. This process gives all of them together FAILURE_TIMEOUT_S,
  or SAVE_TIMEOUT_S after a signal.
- It returns the exit code of the failed rank that it happens to check first, 256 - N for signal N.
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

from launcher.supervision.failure_report import FailureEvidence, FailureSummary, RankExit, read_log_sizes, report_hang
from launcher.supervision.observer import Observer, add_host_names
from launcher.supervision.processes import is_alive, kill_sessions, list_process_trees, send_signal
from launcher.supervision.remote import RemoteRanks
from launcher.supervision.terminal import log
from launcher.targets.local import Command
from trainer.contract.exit_codes import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_RESTART,
    EXIT_USAGE,
    FORWARDED_SIGNALS,
    STOP_CODES,
    choose_stop_code,
    is_stop_status,
    to_exit_code,
)
from trainer.contract.heartbeat import clear_rank_reports, read_hang_report, read_heartbeats
from trainer.contract.launcher_process import touch_alive_file
from trainer.contract.restart_record import RestartNote

POLL_S = 0.1
FAILURE_TIMEOUT_S = 8.0
SAVE_TIMEOUT_S = 60.0  # after a signal, when other ranks may still complete a checkpoint
# An unreachable host never reports that its ranks exited, and ssh waits for it until TCP times out.
END_TIMEOUT_S = 22.0
# `timeout` and some schedulers signal both the process and its group: count signals within this interval once.
SAME_SIGNAL_S = 0.5
StartProcesses = Callable[[IO[bytes]], list[subprocess.Popen[bytes]]]


class RunState(Enum):
    STARTING = auto()
    RUNNING = auto()
    STOPPING = auto()
    """After a signal: ranks save and exit; once one has exited, the others must exit by the deadline."""
    FAILING = auto()
    """After a failure: the other ranks must exit by the deadline."""


class AbortReason(Enum):
    """Reason to stop watching a run, and to kill it, before all its processes have exited."""

    AT_ONCE = auto()
    """After another signal, or if there is nothing to save."""
    SILENT = auto()
    """No rank sends heartbeats."""
    OUTLIVED = auto()
    """All ranks have exited, but their launcher has not."""
    UNREACHABLE = auto()
    """Ranks, or their launcher, did not exit after they were signaled."""


class StopSignals:
    def __init__(self) -> None:
        self.received: list[int] = []
        self.announced_at: float | None = None
        self.is_sent = False
        self._latest = -SAME_SIGNAL_S

    def record(self, number: int, frame: FrameType | None) -> None:
        """Only record the signal; signal handlers must be async-safe."""
        now = time.monotonic()
        if now - self._latest >= SAME_SIGNAL_S:
            self.received.append(number)
        self._latest = now


class Supervisor:
    """Supervises one run of a command: its processes, the signals received, and how each rank exited.

    `remote` signals ranks that were started by srun, mpirun or pdsh, on this host or others. `start(log)` starts the
    processes, which write their output to `log`; by default, it starts `command`.
    """

    def __init__(
        self,
        command: Command,
        logs: Path,
        *,
        hang_timeout_minutes: float = 0.0,
        remote: RemoteRanks | None = None,
        start: StartProcesses | None = None,
    ) -> None:
        self._start = start or (lambda log: command.start(log, log))
        self.command, self.logs, self.remote = command, logs, remote
        self.state = RunState.STARTING
        self.abort: AbortReason | None = None
        self.deadline = math.inf
        """Value of time.monotonic() at which remaining ranks are killed."""
        self.processes: list[subprocess.Popen[bytes]] = []
        """One per rank; with `remote`, only the launcher."""
        self.exits: dict[int, RankExit] = {}
        self.stop = StopSignals()
        self.signals = self.stop.received
        self.failure: FailureSummary | None = None
        self.observer = Observer(logs, command.ranks, remote, hang_timeout_minutes * 60.0)

    def run(self) -> int:
        """Run the ranks until they end; return 0, 1 (failed), 2 (usage), 75 (preempted), 77 (restart) or 128 + N."""
        self.logs.mkdir(parents=True, exist_ok=True)
        clear_rank_reports(self.logs)
        sizes = read_log_sizes(self.logs)
        ended = threading.Event()
        handlers = {number: signal.signal(number, self.stop.record) for number in FORWARDED_SIGNALS}
        try:
            with open(self.logs / "launcher.log", "ab") as log:
                log.write(f"== {time.strftime('%Y-%m-%d %H:%M:%S')} {self.command.format_shell()}\n".encode())
                log.flush()
                self.observer.log.skip_existing_output()
                self.processes = self._start(log)
            if self.remote is None:
                self.observer.ranks = {rank: psutil.Process(process.pid) for rank, process in enumerate(self.processes)}
            else:
                threading.Thread(target=touch_alive_file, args=(self.logs, ended), daemon=True).start()
            try:
                self._watch()
            finally:
                if self.remote is not None and self.abort is not AbortReason.UNREACHABLE:
                    self.remote.kill(self.processes[0], self.logs)
                kill_sessions([process.pid for process in self.processes])
            self._record_exits()
            codes = [process.wait() for process in self.processes]
            waits = self.abort is not AbortReason.AT_ONCE and (any(codes) or self.remote is not None)
            if waits and not self.observer.folder.wait_until_readable(self.signals):
                return choose_fallback_exit_code(codes, self.signals)
            if self.abort is AbortReason.OUTLIVED:  # the launcher's code reflects only the signal that killed it
                codes = [beat.exit_code or EXIT_OK for _, beat in sorted(read_heartbeats(self.logs).items())]
            return self._choose_exit_code([EXIT_FAILED] if self.abort is AbortReason.UNREACHABLE else codes, sizes)
        finally:
            ended.set()
            for number, handler in handlers.items():
                # A stopped run ignores further signals while Python exits.
                signal.signal(number, signal.SIG_IGN if self.signals else handler)

    def _watch(self) -> None:
        self.state = RunState.RUNNING
        while self.abort is None and any(process.poll() is None for process in self.processes):
            self.observer.poll()
            self._record_exits()
            self.abort = self._advance()
            if self.abort is None:
                time.sleep(POLL_S)

    def _advance(self) -> AbortReason | None:
        if self.signals and self._stop():
            return AbortReason.AT_ONCE
        if self.observer.silence is not None:
            return AbortReason.SILENT
        if self.observer.has_outlived_ranks():
            return AbortReason.OUTLIVED
        now = time.monotonic()
        if math.isinf(self.deadline):
            self._set_deadline(now)
        elif now > self.deadline:
            alive = [process for process in self.observer.ranks.values() if is_alive(process)]
            send_signal(list_process_trees(alive), signal.SIGKILL)
            if self.remote is not None:
                self.remote.kill(self.processes[0], self.logs)
                if now - self.deadline > END_TIMEOUT_S:
                    return AbortReason.UNREACHABLE
        return None

    def _set_deadline(self, now: float) -> None:
        """Set a deadline once a rank has failed or stopped, as other ranks may wait for it uninterruptibly in NCCL."""
        stopped = self._has_stopped()
        has_failed = any(rank_exit.status not in (None, 0, *STOP_CODES) for rank_exit in self.exits.values())
        if not (stopped or has_failed or self.observer.has_failure):
            return
        saves = bool(self.signals) and not stopped
        if saves:
            log(f"a rank has failed; the other ranks have {SAVE_TIMEOUT_S:.0f} s to save")
        self.deadline = now + (SAVE_TIMEOUT_S if saves else FAILURE_TIMEOUT_S)
        self.state = RunState.STOPPING if self.signals or stopped else RunState.FAILING
        self.observer.log.text_before_end = self.observer.log.read()

    def _record_exits(self) -> None:
        for rank, process in self.observer.ranks.items():
            if rank in self.exits:
                continue
            if self.remote is not None:
                if not is_alive(process):
                    self.exits[rank] = RankExit(time.monotonic())
            elif (status := self.processes[rank].poll()) is not None:
                is_killing = self.abort is AbortReason.AT_ONCE or time.monotonic() > self.deadline
                was_killed = status == -signal.SIGKILL and is_killing
                self.exits[rank] = RankExit(time.monotonic(), status, killed_by_launcher=was_killed)

    def _stop(self) -> bool:
        """Forward the first signal to every rank; return True when the ranks must be killed."""
        stop, now = self.stop, time.monotonic()
        first, *others = map(signal.Signals, self.signals)
        # SIGTERM after SIGUSR1 does not stop at once: schedulers send both.
        if others and (first != signal.SIGUSR1 or signal.SIGINT in others):
            log("stopping at once; unsaved progress is lost" if self.observer.has_begun_step else "stopping at once")
            return True
        if stop.announced_at is None:
            again = "Ctrl-C" if first == signal.SIGUSR1 else "another signal"
            has_begun_step = self.observer.check_for_steps()
            action = "saving a checkpoint, then stopping" if has_begun_step else "stopping, before the first step"
            log(f"{first.name}: {action}; {again} stops at once")
            stop.announced_at = now
            if self.state is RunState.RUNNING:
                self.state = RunState.STOPPING
        if self.remote is not None:
            stop.is_sent = stop.is_sent or self.remote.stop(self.processes[0], self.logs)
        elif not stop.is_sent:
            send_signal(self.observer.ranks.values(), signal.SIGTERM if first == signal.SIGHUP else first)
            stop.is_sent = True
        is_late = now - stop.announced_at > FAILURE_TIMEOUT_S and self.state is not RunState.FAILING
        if is_late and not self.observer.has_begun_step:
            # No signal reaches a rank that waits for others in native code, and there is nothing to save.
            return not self.observer.check_for_steps()
        return False

    def _has_stopped(self) -> bool:
        """Return whether a rank exited because of a signal, after saving or with nothing to save.

        With `remote`, exit codes count only after a signal to this process, because the launcher also signals ranks.
        """
        codes = {rank_exit.status for rank_exit in self.exits.values()}
        if self.remote is not None and self.signals and self.state is not RunState.FAILING:
            codes |= self.observer.exit_codes
        return not codes.isdisjoint(STOP_CODES)

    def _choose_exit_code(self, codes: list[int], log_sizes: dict[str, int]) -> int:
        beats = read_heartbeats(self.logs).values()
        if not any(codes) and (self.remote is None or all(beat.exit_code == 0 for beat in beats)):
            return EXIT_OK
        if hang := read_hang_report(self.logs) or self.observer.silence:
            hang = add_host_names(hang, self.remote)
            self.failure = report_hang(self.logs, log_sizes, hang, is_reported=self.observer.has_reported_hang)
            return EXIT_FAILED
        self.observer.exit_codes = {beat.exit_code for beat in beats}
        # Errors in ranks that were waiting for a stopped rank are not failures.
        has_stopped = self._has_stopped()
        waited = {rank for rank, rank_exit in self.exits.items() if has_stopped and rank_exit.killed_by_launcher}
        failed = [code for rank, code in enumerate(codes) if code and not is_stop_status(code) and rank not in waited]
        # A signal to a run that is already failing, for example after losing a node, does not hide the failure, even if
        # the only exit code is that of the launcher, which this process killed.
        failed = failed or [EXIT_FAILED] * (self.state is RunState.FAILING)
        at_once = self.abort is AbortReason.AT_ONCE
        before_steps = not self.observer.has_begun_step and self.state is not RunState.FAILING
        if self.signals and (not failed or at_once or before_steps or has_stopped):
            return choose_stop_code(self.signals, immediate=at_once)
        stopped = [code for code in codes if code in STOP_CODES]
        if stopped and not failed:
            return stopped[0]  # another process signaled the ranks, and they have saved
        code = EXIT_USAGE if EXIT_USAGE in failed else to_exit_code(failed[0]) if failed else EXIT_OK
        return self._report_failure(code, log_sizes)

    def _report_failure(self, code: int, log_sizes: dict[str, int]) -> int:
        """Report the failure and return 2 for a user error, 128 + N if signal N killed the failed rank, else 1.

        If a rank ran out of memory and requests a restart, return 77 without a report.
        """
        if RestartNote.exists(self.logs):
            return EXIT_RESTART
        lost: dict[str, str] = {}
        if self.remote is not None:
            failed, log = self._find_remote_failures(self.remote), self.observer.log.read()
            before = self.observer.log.text_before_end or log
            lost = self.remote.find_lost_hosts(before, log, read_heartbeats(self.logs))
        else:
            failed = {rank: rank_exit for rank, rank_exit in self.exits.items() if rank_exit.status != 0}
        self.failure = FailureEvidence(self.logs, log_sizes, failed, code, lost, self._has_launcher_failed()).report()
        status = self.failure.status
        if code == EXIT_USAGE:
            return EXIT_USAGE
        return 128 - status if status < 0 else EXIT_FAILED

    def _has_launcher_failed(self) -> bool:
        has_aborted = self.abort in (AbortReason.OUTLIVED, AbortReason.UNREACHABLE)
        if self.remote is None or self.state is RunState.FAILING or has_aborted:
            return False
        return self.remote.is_launcher_failure(self.processes[0].wait(), self.observer.log.read())

    def _find_remote_failures(self, remote: RemoteRanks) -> dict[int, RankExit]:
        """Return the ranks that did not report success, with the time of their last heartbeat.

        The launcher's log has the status of ranks that could not report it themselves.
        """
        now, monotonic_offset = time.monotonic(), time.monotonic() - time.time()
        beats = read_heartbeats(self.logs)
        reported = remote.parse_statuses(self.observer.log.read(), beats)
        failed: dict[int, RankExit] = {}
        for rank, beat in beats.items():
            if beat.exit_code != 0:
                rank_exit = self.exits.get(rank, RankExit(beat.time + monotonic_offset))
                status = reported.get(rank) if beat.exit_code is None else beat.exit_code
                # If only the status of other ranks is known, this process killed this rank later.
                failed[rank] = RankExit(now if reported and status is None else rank_exit.time, status)
        return failed


def choose_fallback_exit_code(codes: Sequence[int], signals: Sequence[int]) -> int:
    if not any(codes):
        return EXIT_OK
    if signals:
        return choose_stop_code(signals)
    return EXIT_USAGE if EXIT_USAGE in codes else EXIT_FAILED
