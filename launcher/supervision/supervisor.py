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
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from launcher.supervision.build_locks import describe_awaited_build, remove_stale_locks
from launcher.supervision.failure_report import Death, Failure, Fault, log_sizes, report_hang
from launcher.supervision.lost_folder import FolderWatch, exit_code_without_folder
from launcher.supervision.processes import (
    end_sessions,
    find_local_ranks,
    is_alive,
    is_stopped,
    list_trees,
    oom_kills,
    send,
)
from launcher.supervision.remote import LauncherLog, Reach
from launcher.supervision.silence import SILENCE_S, Silence, SilentHosts, diagnose_silence, name_hosts
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
from trainer.contract.heartbeat import Hang, clear_heartbeats, read_hang, read_heartbeats
from trainer.contract.launcher_process import keep_alive_file
from trainer.contract.rendezvous import host_name
from trainer.contract.restart_record import RestartNote

POLL_S = 0.1
FAILURE_PATIENCE_S = 8.0
SAVE_PATIENCE_S = 60.0  # after a signal: the others may still complete a checkpoint without the failed rank
# An unreachable host never reports the end of its ranks, and ssh waits for it until TCP times out.
END_PATIENCE_S = 22.0
# srun waits forever for a node if the slurmstepd there was killed after its rank had ended.
OUTLIVED_S = 35.0  # longer than a failed run's patience
REMINDER_S, LOCKS_EVERY_S = 60.0, 10.0
# `timeout` and some schedulers signal both the process and its group: signals this close together count once.
ONE_SIGNAL_S = 0.5
Start = Callable[[IO[bytes]], list[subprocess.Popen[bytes]]]


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
        self.command = command
        self.logs = logs
        self.reach = reach
        self._start = start or (lambda log: command.start(log, log))
        self.processes: list[subprocess.Popen[bytes]] = []
        """One per rank; with `reach` only the launcher."""
        self.ranks: dict[int, psutil.Process] = {}
        """Known ranks of this host."""
        self.deaths: dict[int, Death] = {}
        self.signals: list[int] = []
        self.fault: Fault | None = None
        self._folder = FolderWatch(logs)
        self._silence = Silence(logs, hang_timeout_minutes * 60.0)
        self._silent_hosts = SilentHosts()
        self._signalled_at = -ONE_SIGNAL_S
        self._failed_at: float | None = None
        self._ends_at = math.inf  # of all ranks, because one has failed or stopped
        self._log_before_end = ""
        self._stop_sent_at: float | None = None
        self._is_stop_sent = False
        self._reminded_at = self._checked_at = self._locks_due_at = 0.0
        self._has_failed = False
        self._has_reported_wait = False
        self._has_reported_hang = False
        self._trains = False
        self._codes: set[int | None] = set()
        self._silent_run: Hang | None = None
        self._cut_short = False
        self._cut_off = False
        self._all_ended_at: float | None = None
        self._is_outlived = False

    def run(self) -> int:
        """Run to the end, leave no process behind, and return 0, 1 (failed), 2 (usage), 75 (preempted) or 128 + N."""
        self.logs.mkdir(parents=True, exist_ok=True)
        clear_heartbeats(self.logs)
        self.old_sizes = log_sizes(self.logs)
        self._oom_kills = oom_kills()
        ended = threading.Event()
        before = {number: signal.signal(number, self._record_signal) for number in PASSED_ON}
        try:
            with open(self.logs / "launcher.log", "ab") as log:
                log.write(f"== {time.strftime('%Y-%m-%d %H:%M:%S')} {self.command.shell()}\n".encode())
                log.flush()
                self.log = LauncherLog(self.logs / "launcher.log")
                self.processes = self._start(log)
            if self.reach is None:
                self.ranks = {rank: psutil.Process(process.pid) for rank, process in enumerate(self.processes)}
            else:
                threading.Thread(target=keep_alive_file, args=(self.logs, ended), daemon=True).start()
            try:
                self._watch()
            finally:
                if self.reach is not None and not self._cut_off:
                    self.reach.end(self.processes[0], self.logs)
                end_sessions([process.pid for process in self.processes])
            self._record_deaths()
            codes = [process.wait() for process in self.processes]
            waits = not self._cut_short and (any(codes) or self.reach is not None)
            if waits and not self._folder.wait_until_readable(self.signals):
                return exit_code_without_folder(codes, self.signals)
            if self._is_outlived:  # its own code only reflects the signal that just ended it
                codes = [beat.exit_code or EXIT_OK for _, beat in sorted(read_heartbeats(self.logs).items())]
            return self._choose_exit_code([EXIT_FAILED] if self._cut_off else codes)
        finally:
            ended.set()
            for number, handler in before.items():
                # A stopped run ignores further signals, also while Python itself exits.
                signal.signal(number, signal.SIG_IGN if self.signals else handler)

    def _record_signal(self, number: int, frame: FrameType | None) -> None:
        # Only record the signal; signal handlers must be async-safe.
        now = time.monotonic()
        if now - self._signalled_at >= ONE_SIGNAL_S:
            self.signals.append(number)
        self._signalled_at = now

    def _watch(self) -> None:
        while any(process.poll() is None for process in self.processes):
            self._check_state()
            self._record_deaths()
            self._cut_short = bool(self.signals) and self._stop()
            if self._cut_short or self._silent_run is not None or self._has_outlived_ranks():
                return
            self._end_after_failure()
            if self._cut_off:
                return
            time.sleep(POLL_S)

    def _has_outlived_ranks(self) -> bool:
        """Return whether the ranks' launcher still runs OUTLIVED_S after all of them reported their end."""
        ended = self._all_ended_at
        self._is_outlived = ended is not None and time.monotonic() - ended > OUTLIVED_S
        if self._is_outlived:
            say(f"all ranks ended {OUTLIVED_S:.0f} s ago, but their launcher still waits; ending it")
        return self._is_outlived

    def _record_deaths(self) -> None:
        for rank, process in self.ranks.items():
            if rank in self.deaths:
                continue
            if self.reach is not None:
                if not is_alive(process):
                    self.deaths[rank] = Death(time.monotonic())
            elif (status := self.processes[rank].poll()) is not None:
                by_us = status == -signal.SIGKILL and (self._cut_short or time.monotonic() > self._ends_at)
                self.deaths[rank] = Death(time.monotonic(), status, killed_by_launcher=by_us)

    def _check_state(self) -> None:
        """Read the heartbeats and the launcher's log, at most once a second."""
        now = time.monotonic()
        if now - self._checked_at < 1.0:
            return
        self._checked_at = now
        if not self._folder.is_readable():
            self._silence.has_timed_out()  # restarts its clock
            return
        beats = read_heartbeats(self.logs)
        self._trains |= any(beat.step for beat in beats.values())
        self._codes = {beat.exit_code for beat in beats.values()}
        if self.reach is not None:
            self.ranks = find_local_ranks(beats.values()) | self.ranks
            self._has_failed = self._has_failed or self.log.has_new_failure()
            ended = len(beats) == self.command.ranks and all(beat.exit_code is not None for beat in beats.values())
            self._all_ended_at = (self._all_ended_at or now) if ended else None
            for host in self._silent_hosts.find_newly_silent(beats, now):
                say(f"no heartbeat from {host} for {SILENCE_S:.0f} s; {self.reach.describe_wait()}")
        waiting = [beat for beat in beats.values() if beat.waits_for_build]
        if waiting and not self._has_reported_wait:
            self._has_reported_wait = True
            whom = describe_awaited_build() if waiting[0].host == host_name() else "the build of an operator there"
            say(f"rank {waiting[0].rank} on {waiting[0].host} waits for {whom}")
        if now > self._locks_due_at:
            # Before the first step this run may wait for a build of another run that gets killed.
            self._locks_due_at = math.inf if self._trains else now + LOCKS_EVERY_S
            remove_stale_locks()
        if self._silence.has_timed_out():
            # Before mpirun is ended, which resumes stopped ranks.
            self._silent_run = diagnose_silence(self.command.ranks, beats)
        if (hang := read_hang(self.logs)) is not None:
            if not self._has_reported_hang:
                self._has_reported_hang = True  # now, because the launcher of an unreachable host may not return
                say(f"the run failed: {name_hosts(hang, self.reach).text}")
            # A stopped rank must run to write its stack and end; one without heartbeats would only start training.
            halted = (process for rank, process in self.ranks.items() if rank in beats and is_stopped(process))
            send(halted, signal.SIGCONT)

    def _stop(self) -> bool:
        """Forward the first signal to every rank; return True when the time for a clean end is over."""
        # After SIGUSR1 a scheduler's SIGTERM is only a reminder.
        if len(self.signals) > 1 and (self.signals[0] != signal.SIGUSR1 or signal.SIGINT in self.signals[1:]):
            say("stopping at once: unsaved progress is lost" if self._trains else "stopping at once")
            return True
        now = time.monotonic()
        if self._stop_sent_at is None:
            first = signal.Signals(self.signals[0])
            self._trains |= any(beat.step for beat in read_heartbeats(self.logs).values())
            again = "Ctrl-C" if first == signal.SIGUSR1 else "once more"
            doing = "saving a checkpoint, then stopping" if self._trains else "stopping, before the first step"
            say(f"{first.name}: {doing}; {again} stops at once")
            self._stop_sent_at = self._reminded_at = now
        self._is_stop_sent = self._is_stop_sent or self._send_stop()
        if not self._trains and now - self._stop_sent_at > FAILURE_PATIENCE_S:
            # A rank that waits for others in native code does not see the signal, and there is nothing to save.
            self._trains |= any(beat.step for beat in read_heartbeats(self.logs).values())
            return not self._trains
        if now - self._reminded_at > REMINDER_S:
            say("still saving; Ctrl-C stops at once")
            self._reminded_at = now
        return False

    def _send_stop(self) -> bool:
        if self.reach is not None:
            return self.reach.stop(self.processes[0], self.logs)
        first = signal.Signals(self.signals[0])
        send(self.ranks.values(), signal.SIGTERM if first == signal.SIGHUP else first)
        return True

    def _end_after_failure(self) -> None:
        """End the other ranks after one failed or stopped: they wait for it in NCCL and see no signal."""
        now, stopped = time.monotonic(), self._has_stopped()
        if math.isinf(self._ends_at):
            if self._has_failure() or stopped:
                saves = bool(self.signals) and not stopped
                if saves:
                    say(f"a rank has failed meanwhile; the others have {SAVE_PATIENCE_S:.0f} s to save")
                self._ends_at = now + (SAVE_PATIENCE_S if saves else FAILURE_PATIENCE_S)
                self._failed_at = None if self.signals or stopped else now
                self._log_before_end = self.log.text()
        elif now > self._ends_at:
            send(list_trees(process for process in self.ranks.values() if is_alive(process)), signal.SIGKILL)
            if self.reach is not None:
                self.reach.end(self.processes[0], self.logs)
                self._cut_off = now - self._ends_at > END_PATIENCE_S

    def _has_stopped(self) -> bool:
        """Return whether a rank ended because of a signal, after saving or with nothing to save.

        Ranks of another launcher count only after a signal to this one: their launcher also ends them by signal.
        """
        codes = {death.status for death in self.deaths.values()}
        if self.reach is not None and self.signals and self._failed_at is None:
            codes |= self._codes
        return not codes.isdisjoint(STOPPED)

    def _has_failure(self) -> bool:
        return self._has_failed or any(death.status not in (None, 0, *STOPPED) for death in self.deaths.values())

    def _choose_exit_code(self, codes: list[int]) -> int:
        beats = read_heartbeats(self.logs).values()
        if not any(codes) and (self.reach is None or all(beat.exit_code == 0 for beat in beats)):
            return EXIT_OK
        if hang := read_hang(self.logs) or self._silent_run:
            hang = name_hosts(hang, self.reach)
            self.fault = report_hang(self.logs, self.old_sizes, hang, is_reported=self._has_reported_hang)
            return EXIT_FAILED
        self._codes = {beat.exit_code for beat in beats}
        # Errors of ranks that then wait for the stopped one are no failure.
        has_stopped = self._has_stopped()
        waited = {rank for rank, death in self.deaths.items() if has_stopped and death.killed_by_launcher}
        failed = [code for rank, code in enumerate(codes) if code and not is_stopped_by_us(code) and rank not in waited]
        # A signal during the end of a failed run, as with a lost node, does not hide the failure.
        before_steps = not self._trains and self._failed_at is None
        if self.signals and (not failed or self._cut_short or before_steps or has_stopped):
            return choose_stop_code(self.signals, at_once=self._cut_short)
        stopped = [code for code in codes if code in STOPPED]
        if stopped and not failed:
            return stopped[0]  # another process signalled the ranks, and they have saved
        if EXIT_USAGE in failed:
            return self._report_failure(EXIT_USAGE)
        return self._report_failure(to_exit_code(failed[0]) if failed else EXIT_OK)

    def _report_failure(self, code: int) -> int:
        """Report the failure and return 2 for a user error, 128 + N if signal N ended the rank to blame, else 1.

        If ranks ran out of memory and ask for a restart, return 77 without a report.
        """
        if RestartNote.exists(self.logs):
            return EXIT_RESTART
        lost: dict[str, str] = {}
        if self.reach is not None:
            failed, log = self._find_remote_failures(self.reach), self.log.text()
            lost = self.reach.find_lost_hosts(self._log_before_end or log, log, read_heartbeats(self.logs))
        else:
            failed = {rank: death for rank, death in self.deaths.items() if death.status != 0}
        oom_killed = None if self._oom_kills is None else (oom_kills() or 0) > self._oom_kills
        failure = Failure(self.logs, self.old_sizes, failed, code, oom_killed, lost, self._has_launcher_failed())
        self.fault = failure.report()
        status = self.fault.status
        if code == EXIT_USAGE:
            return EXIT_USAGE
        return 128 - status if status < 0 else EXIT_FAILED

    def _has_launcher_failed(self) -> bool:
        """Return whether the ranks' launcher itself was killed before any rank failed."""
        if self.reach is None or self._failed_at is not None or self._is_outlived or self._cut_off:
            return False
        return self.reach.is_launcher_failure(self.processes[0].wait(), self.log.text())

    def _find_remote_failures(self, reach: Reach) -> dict[int, Death]:
        """Return the ranks without a reported success; a killed rank's heartbeats stop before the others'.

        The status of ranks that could not report it themselves is in the launcher's log.
        """
        now, to_monotonic = time.monotonic(), time.monotonic() - time.time()
        beats = read_heartbeats(self.logs)
        reported = reach.parse_statuses(self.log.text(), beats)
        failed: dict[int, Death] = {}
        for rank, beat in beats.items():
            if beat.exit_code != 0:
                death = self.deaths.get(rank, Death(beat.time + to_monotonic))
                status = reported.get(rank) if beat.exit_code is None else beat.exit_code
                # An unknown end while another's is known: this launcher ended it, last.
                failed[rank] = Death(now if reported and status is None else death.when, status)
        return failed
