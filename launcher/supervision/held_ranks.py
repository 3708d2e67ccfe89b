"""The ranks of this machine from their start to the end of the checks, which the first of them does.

All of them import at the same time, and nothing is imported for the checks alone. A run that is refused, or stopped by
then, has written nothing to its folder.
"""

import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import IO, Any, Self

import psutil

from launcher.supervision.failure_report import describe_status
from launcher.supervision.processes import end_sessions, is_stopped
from launcher.supervision.stop_signals import PASSED_ON, exit_code_of
from launcher.supervision.terminal import say
from launcher.targets.local import Command
from trainer.contract.exit_codes import EXIT_FAILED, exit_code_after
from trainer.contract.held_start import CHECKED, OPTION, Release
from trainer.contract.rank_variables import host_name

POLL_S = 0.05
HALTED_POLL_S = 1.0
PATIENCE_S = 10.0
FAILED = "the run failed before its checks were done"
_SIGNAL_OF = {exit_code_after(number): number for number in PASSED_ON}


class Halted:
    """Notices processes that have been stopped for so long; never for 0 s."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
        self._processes = [psutil.Process(process.pid) for process in processes]
        self._seconds, self._looked_at = seconds, time.monotonic()
        self._since: dict[int, float] = {}

    def too_long(self) -> int | None:
        """The first of them; looks once a second, and a time in which this process stood still itself counts little."""
        now = time.monotonic()
        if not self._seconds or now - self._looked_at < HALTED_POLL_S:
            return None
        passed, self._looked_at = min(now - self._looked_at, 2.0 * HALTED_POLL_S), now
        for number, process in enumerate(self._processes):
            self._since[number] = self._since.get(number, 0.0) + passed if is_stopped(process) else 0.0
        return next((number for number, since in self._since.items() if since > self._seconds), None)


class HeldRanks:
    """Processes that wait for `release`; those that were not released end with the `with` block."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[socket.socket] = []
        # The user sees what the first rank prints; what the others print goes to the launcher's log.
        self._said = tempfile.TemporaryFile()
        self._signals: list[tuple[int, float]] = []
        self._handlers: dict[int, Any] = {}

    @classmethod
    def start(cls, command: Command) -> Self:
        """Start every rank of `command`, each as the leader of a session of its own.

        Signals are noted from here on, for `until_checked`: one that raised would leave ranks that nobody ends.
        """
        held = cls()
        held._note_signals()
        # A rank unblocks Ctrl-C once it can end without a traceback.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            for variables in command.of_each_rank:
                here, there = socket.socketpair()
                with there:
                    held._channels.append(here)
                    output = held._said if held.processes else None
                    held.processes.append(command.start_rank(variables, there, output, OPTION))
        except BaseException:
            held.__exit__()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return held

    @property
    def waits(self) -> bool:
        """Whether they have not been released yet."""
        return bool(self._channels)

    def until_checked(self, hang_timeout_minutes: float = 0.0) -> int:
        """Wait for the first rank's checks: 0 once they pass, else the exit code of this command.

        Checks may take as long as they like, but not in a process that was stopped and does not go on.
        """
        try:
            code = self._wait(Halted(self.processes, hang_timeout_minutes * 60.0))
        finally:
            self._no_longer_note_signals()
        return self._stopped() if not code and self._signals else code

    def _wait(self, halted: Halted) -> int:
        while not self._signals:
            ready, _, _ = select.select(self._channels[:1], [], [], POLL_S)
            if ready and self._channels[0].recv(len(CHECKED)) == CHECKED:
                return 0
            if any(process.poll() is not None for process in self.processes):
                return self._failed()
            if (rank := halted.too_long()) is not None:
                say(f"{FAILED}: the run hangs: rank {rank} on {host_name()} is stopped (SIGSTOP, or a debugger)")
                self.end()
                return EXIT_FAILED
        return self._stopped()

    def release(self, arguments: Sequence[str], log: IO[bytes]) -> list[subprocess.Popen[bytes]]:
        """Let all ranks go on with these arguments, and their output to the file `log`; their processes."""
        self._said.seek(0)
        log.write(self._said.read())
        log.flush()
        for channel in self._channels:
            Release(list(arguments), str(log.name)).send(channel)
        self._channels = []
        return self.processes

    def end(self) -> None:
        """End all that wait."""
        end_sessions([process.pid for process in self.processes])
        for process in self.processes:
            process.wait()
        for channel in self._channels:
            channel.close()
        self._channels = []

    def _failed(self) -> int:
        """The exit code of the first rank, whose line the user has seen, or of whichever ended before it."""
        ended = {rank: status for rank, process in enumerate(self.processes) if (status := process.poll()) is not None}
        rank, status = next(iter(ended.items()))
        code = exit_code_of(status)
        if code in _SIGNAL_OF:
            return _told(_SIGNAL_OF[code])
        if rank or status <= 0:
            self._said.seek(0)
            say(self._said.read().decode(errors="replace").rstrip())
            say(f"{FAILED}: rank {rank} on {host_name()} {describe_status(status)}")
        return code or 1

    def _stopped(self) -> int:
        """Let the first rank remove what it has half built, for some seconds or until the next signal."""
        number, since = self._signals[0]
        self.processes[0].terminate()
        while self.processes[0].poll() is None and len(self._signals) == 1 and time.monotonic() - since < PATIENCE_S:
            time.sleep(POLL_S)
        self.end()
        return _told(number)

    def _note_signals(self) -> None:
        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append((number, time.monotonic()))

        self._handlers = {number: signal.signal(number, note) for number in PASSED_ON}

    def _no_longer_note_signals(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        if self.waits:
            self.end()
        self._no_longer_note_signals()
        self._said.close()


def _told(number: int) -> int:
    """Print one line, as every command does that a signal ends; the exit code."""
    say("stopped" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}")
    return exit_code_after(number)
