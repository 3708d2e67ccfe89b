"""Starts the ranks of a run, passes signals on to them, and returns the exit code that the run deserves.

Ranks of this machine are its own children (launcher/targets/local.py), and how they ended is what the kernel says.
Below srun, mpirun and pdsh they are somebody else's: their heartbeats tell who ended by itself and how, the launcher's
log tells of those that were killed, and the launcher's exit code 0 is believed if no heartbeat contradicts it.

What DeepSpeed's launcher (0.19.8), which pdsh starts on every host, does by itself and why it is not left alone:
- When a rank fails it gives the others 30 s each, one after the other. They get FAILURE_PATIENCE_S together, or
  SAVE_PATIENCE_S where a signal came before.
- It passes on the exit code of whichever failed rank it looks at first, 256 - N for signal N.
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

from launcher.doctor.build_locks import build_waited_for, remove_stale_locks
from launcher.supervision.failure_report import Death, Failure, Fault, log_sizes, tell_hang
from launcher.supervision.kernel_oom import oom_kills
from launcher.supervision.launcher_log import LauncherLog
from launcher.supervision.lost_folder import FolderWatch, code_without_folder
from launcher.supervision.processes import end_sessions, find_noted_ranks, is_alive, is_stopped, send, with_children
from launcher.supervision.remote import Reach
from launcher.supervision.silence import SILENCE_S, Silence, SilentHosts, name_hosts, silent_run
from launcher.supervision.stop_signals import PASSED_ON, STOPPED, exit_code_of, exit_code_of_stop, is_stopped_by_us
from launcher.supervision.terminal import say
from launcher.targets.local import Command
from trainer.contract.exit_codes import EXIT_FAILED, EXIT_OK, EXIT_RESTART, EXIT_USAGE
from trainer.contract.heartbeat import Hang, clear_heartbeats, read_hang, read_heartbeats
from trainer.contract.launcher_process import keep_alive_file
from trainer.contract.rank_variables import host_name
from trainer.contract.restart_note import RestartNote

POLL_S = 0.1
FAILURE_PATIENCE_S = 8.0
SAVE_PATIENCE_S = 60.0  # after a signal: others may still write what is whole without the rank that has failed
# A host that is cut off never says that its ranks are ended, and ssh waits for it for as long as TCP does.
END_PATIENCE_S = 22.0
# srun waits without end for a node whose slurmstepd was killed after the rank there had ended.
OUTLIVED_S = 35.0  # longer than a failed run's patience
REMINDER_S, LOCKS_EVERY_S = 60.0, 10.0
# `timeout` and some schedulers signal both the process and its group: what comes so close together was meant once.
ONE_SIGNAL_S = 0.5
Start = Callable[[IO[bytes]], list[subprocess.Popen[bytes]]]


class Supervisor:
    """One run of a command: its processes, the signals that came, and how each rank ended.

    `reach` is the way to ranks that this process has not started itself, on this host or others; `start` gives the
    processes, whose output goes to the file, where they are not to be started by `command` now.
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
        """Every rank; or with `reach` the launcher."""
        self.ranks: dict[int, psutil.Process] = {}
        """Those of this host, as far as they are known."""
        self.deaths: dict[int, Death] = {}
        self.signals: list[int] = []
        self.fault: Fault | None = None
        """What the run has failed by."""
        self._folder = FolderWatch(logs)
        self._silence = Silence(logs, hang_timeout_minutes * 60.0)
        self._silent_hosts = SilentHosts()
        self._signalled_at = -ONE_SIGNAL_S
        self._failed_at: float | None = None
        self._ends_at = math.inf  # of all ranks, because one has failed or stopped
        self._log_before_end = ""
        self._stop_sent_at: float | None = None
        self._has_told_stop = False
        self._reminded_at = self._looked_at = self._locks_due_at = 0.0
        self._has_failed = False
        self._has_told_wait = False
        self._has_told_hang = False
        self._trains = False
        self._codes: set[int | None] = set()
        self._silent_run: Hang | None = None
        self._cut_short = False
        self._cut_off = False
        self._all_ended_at: float | None = None
        self._is_outlived = False

    def run(self) -> int:
        """Start, wait, and leave nothing behind; returns 0 done, 1 failed, 2 usage, 75 preempted, 128 + signal."""
        self.logs.mkdir(parents=True, exist_ok=True)
        clear_heartbeats(self.logs)
        self.old_sizes = log_sizes(self.logs)
        self._oom_kills = oom_kills()
        ended = threading.Event()
        before = {number: signal.signal(number, self._note) for number in PASSED_ON}
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
            self._note_deaths()
            codes = [process.wait() for process in self.processes]
            waits = not self._cut_short and (any(codes) or self.reach is not None)
            if waits and not self._folder.returns(self.signals):
                return code_without_folder(codes, self.signals)
            if self._is_outlived:  # its own code is that of the signals by which it was ended just now
                codes = [beat.exit_code or EXIT_OK for _, beat in sorted(read_heartbeats(self.logs).items())]
            return self._verdict([EXIT_FAILED] if self._cut_off else codes)
        finally:
            ended.set()
            for number, handler in before.items():
                # A run that was told to stop has: another signal changes nothing, also while Python itself ends.
                signal.signal(number, signal.SIG_IGN if self.signals else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Only remembered here: a handler may interrupt anything.
        now = time.monotonic()
        if now - self._signalled_at >= ONE_SIGNAL_S:
            self.signals.append(number)
        self._signalled_at = now

    def _watch(self) -> None:
        while any(process.poll() is None for process in self.processes):
            self._look_around()
            self._note_deaths()
            self._cut_short = bool(self.signals) and self._stop()
            if self._cut_short or self._silent_run is not None or self._outlives_its_ranks():
                return
            self._end_after_failure()
            if self._cut_off:
                return
            time.sleep(POLL_S)

    def _outlives_its_ranks(self) -> bool:
        """Whether what started the ranks elsewhere is still there long after all of them have said how they ended."""
        ended = self._all_ended_at
        self._is_outlived = ended is not None and time.monotonic() - ended > OUTLIVED_S
        if self._is_outlived:
            say(f"all ranks ended {OUTLIVED_S:.0f} s ago, and what started them still waits: it is ended")
        return self._is_outlived

    def _note_deaths(self) -> None:
        """Ranks that have ended since the last look: with their exit status where this process is their parent."""
        for rank, process in self.ranks.items():
            if rank in self.deaths:
                continue
            if self.reach is not None:
                if not is_alive(process):
                    self.deaths[rank] = Death(time.monotonic())
            elif (status := self.processes[rank].poll()) is not None:
                tidied_up = status == -signal.SIGKILL and (self._cut_short or time.monotonic() > self._ends_at)
                self.deaths[rank] = Death(time.monotonic(), status, tidied_up=tidied_up)

    def _look_around(self) -> None:
        """Once a second what is dear: the heartbeats, and what the launcher below has written."""
        now = time.monotonic()
        if now - self._looked_at < 1.0:
            return
        self._looked_at = now
        if not self._folder.is_there():
            self._silence.is_complete()  # its time begins anew
            return
        beats = read_heartbeats(self.logs)
        self._trains |= any(beat.step for beat in beats.values())
        self._codes = {beat.exit_code for beat in beats.values()}
        if self.reach is not None:
            self.ranks = find_noted_ranks(beats.values()) | self.ranks
            self._has_failed = self._has_failed or self.log.tells_of_failure()
            ended = len(beats) == self.command.ranks and all(beat.exit_code is not None for beat in beats.values())
            self._all_ended_at = (self._all_ended_at or now) if ended else None
            for host in self._silent_hosts.newly_silent(beats, now):
                say(f"no sign of life from {host} for {SILENCE_S:.0f} s; {self.reach.awaited()}")
        waiting = [beat for beat in beats.values() if beat.waits_for_build]
        if waiting and not self._has_told_wait:
            self._has_told_wait = True
            whom = build_waited_for() if waiting[0].host == host_name() else "the build of an operator there"
            say(f"rank {waiting[0].rank} on {waiting[0].host} waits for {whom}")
        if now > self._locks_due_at:
            # Another run may be killed while it builds what this one waits for, but only before the first step.
            self._locks_due_at = math.inf if self._trains else now + LOCKS_EVERY_S
            remove_stale_locks()
        if self._silence.is_complete():
            self._silent_run = silent_run(self.command.ranks, beats)  # now: mpirun lets go on what it ends
        if (hang := read_hang(self.logs)) is not None:
            if not self._has_told_hang:
                self._has_told_hang = True  # now: a host that is cut off lets its launcher wait
                say(f"the run failed: {name_hosts(hang, self.reach).text}")
            # A rank that was halted must run to write its stack and end; one that had not begun would only begin.
            halted = (process for rank, process in self.ranks.items() if rank in beats and is_stopped(process))
            send(halted, signal.SIGCONT)

    def _stop(self) -> bool:
        """Pass the first signal on to every rank; True when the time for a clean end is over."""
        # After SIGUSR1 a scheduler's SIGTERM is no more than a reminder.
        if len(self.signals) > 1 and (self.signals[0] != signal.SIGUSR1 or signal.SIGINT in self.signals[1:]):
            say("stopping at once: what was not saved yet is lost" if self._trains else "stopping at once")
            return True
        now = time.monotonic()
        if self._stop_sent_at is None:
            first = signal.Signals(self.signals[0])
            self._trains |= any(beat.step for beat in read_heartbeats(self.logs).values())
            again = "Ctrl-C" if first == signal.SIGUSR1 else "once more"
            doing = "saving a checkpoint, then stopping" if self._trains else "stopping, before the first step"
            say(f"{first.name}: {doing}; {again} stops at once")
            self._stop_sent_at = self._reminded_at = now
        self._has_told_stop = self._has_told_stop or self._send_stop()
        if not self._trains and now - self._stop_sent_at > FAILURE_PATIENCE_S:
            # One that waits for the others in native code does not hear the signal, and there is nothing to save.
            self._trains |= any(beat.step for beat in read_heartbeats(self.logs).values())
            return not self._trains
        if now - self._reminded_at > REMINDER_S:
            say("still saving; Ctrl-C stops at once")
            self._reminded_at = now
        return False

    def _send_stop(self) -> bool:
        """To the ranks of this host; to others by the way that is known, and one of them is enough to stop all."""
        if self.reach is not None:
            return self.reach.stop(self.processes[0], self.logs)
        first = signal.Signals(self.signals[0])
        send(self.ranks.values(), signal.SIGTERM if first == signal.SIGHUP else first)
        return True

    def _end_after_failure(self) -> None:
        """Once a rank has failed or stopped, the others wait for it in vain, in NCCL without hearing of a signal."""
        now, stopped = time.monotonic(), self._has_stopped()
        if math.isinf(self._ends_at):
            if self._has_failure() or stopped:
                saves = bool(self.signals) and not stopped
                if saves:
                    say(f"a rank has failed since; the others have {SAVE_PATIENCE_S:.0f} s to save")
                self._ends_at = now + (SAVE_PATIENCE_S if saves else FAILURE_PATIENCE_S)
                self._failed_at = None if self.signals or stopped else now
                self._log_before_end = self.log.text()
        elif now > self._ends_at:
            send(with_children(process for process in self.ranks.values() if is_alive(process)), signal.SIGKILL)
            if self.reach is not None:
                self.reach.end(self.processes[0], self.logs)
                self._cut_off = now - self._ends_at > END_PATIENCE_S

    def _has_stopped(self) -> bool:
        """Whether a rank has ended as a signal told it to: at once where nothing was left to save, else after the save.

        Of ranks that others have started only after a signal of ours: their launchers end them by one, too.
        """
        codes = {death.status for death in self.deaths.values()}
        if self.reach is not None and self.signals and self._failed_at is None:
            codes |= self._codes
        return not codes.isdisjoint(STOPPED)

    def _has_failure(self) -> bool:
        return self._has_failed or any(death.status not in (None, 0, *STOPPED) for death in self.deaths.values())

    def _verdict(self, codes: list[int]) -> int:
        beats = read_heartbeats(self.logs).values()
        if not any(codes) and (self.reach is None or all(beat.exit_code == 0 for beat in beats)):
            return EXIT_OK
        if hang := read_hang(self.logs) or self._silent_run:
            self.fault = tell_hang(self.logs, self.old_sizes, name_hosts(hang, self.reach), is_told=self._has_told_hang)
            return EXIT_FAILED
        self._codes = {beat.exit_code for beat in beats}
        # What another then meets in its place, or was waiting for, is no failure.
        heard = self._has_stopped()
        waited = {rank for rank, death in self.deaths.items() if heard and death.tidied_up}
        failed = [code for rank, code in enumerate(codes) if code and not is_stopped_by_us(code) and rank not in waited]
        # A signal that comes while the launcher already ends a failed run, as with a lost node, does not hide why.
        before_steps = not self._trains and self._failed_at is None
        if self.signals and (not failed or self._cut_short or before_steps or heard):
            return exit_code_of_stop(self.signals, at_once=self._cut_short)
        stopped = [code for code in codes if code in STOPPED]
        if stopped and not failed:
            return stopped[0]  # somebody else signalled the ranks, and they have saved
        if EXIT_USAGE in failed:
            return self._failed(EXIT_USAGE)
        return self._failed(exit_code_of(failed[0]) if failed else EXIT_OK)

    def _failed(self, code: int) -> int:
        """Tell why; 2 for a mistake of the user, 128 + signal where one ended the rank to blame, else 1.

        Ranks that ran out of memory and ask for a restart are the caller's business: 77, and nothing told.
        """
        if RestartNote.is_left(self.logs):
            return EXIT_RESTART
        lost: dict[str, str] = {}
        if self.reach is not None:
            failed, log = self._fallen_elsewhere(self.reach), self.log.text()
            lost = self.reach.lost(self._log_before_end or log, log, read_heartbeats(self.logs))
        else:
            failed = {rank: death for rank, death in self.deaths.items() if death.status != 0}
        struck = None if self._oom_kills is None else (oom_kills() or 0) > self._oom_kills
        self.fault = Failure(self.logs, self.old_sizes, failed, code, struck, lost, self._launcher_fell()).tell()
        status = self.fault.status
        if code == EXIT_USAGE:
            return EXIT_USAGE
        return 128 - status if status < 0 else EXIT_FAILED

    def _launcher_fell(self) -> bool:
        """Whether what starts the ranks elsewhere was itself killed, before anything was known of them."""
        if self.reach is None or self._failed_at is not None or self._is_outlived or self._cut_off:
            return False
        return self.reach.is_own_end(self.processes[0].wait(), self.log.text())

    def _fallen_elsewhere(self, reach: Reach) -> dict[int, Death]:
        """Ranks whose heartbeats tell of no success; one that was killed falls silent before the others do.

        How one ended that could not say it itself stands in the launcher's log.
        """
        now, to_monotonic = time.monotonic(), time.monotonic() - time.time()
        beats = read_heartbeats(self.logs)
        told = reach.statuses(self.log.text(), beats)
        fallen: dict[int, Death] = {}
        for rank, beat in beats.items():
            if beat.exit_code != 0:
                death = self.deaths.get(rank, Death(beat.time + to_monotonic))
                status = told.get(rank) if beat.exit_code is None else beat.exit_code
                # Nobody knows of its end, but of another's: it was ended here, at last.
                fallen[rank] = Death(now if told and status is None else death.when, status)
        return fallen
