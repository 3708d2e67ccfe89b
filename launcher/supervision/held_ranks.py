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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import IO, Self

from launcher.supervision.failure_report import describe_status
from launcher.supervision.processes import end_sessions
from launcher.supervision.stop_signals import EXIT_PREEMPTED, PASSED_ON, exit_code_of
from launcher.supervision.terminal import say
from launcher.targets.local import Command
from trainer.contract.held_start import CHECKED, OPTION, Release

POLL_S = 0.05
PATIENCE_S = 10.0
_SIGNAL_OF = {EXIT_PREEMPTED if number == signal.SIGUSR1 else 128 + number: number for number in PASSED_ON}


class HeldRanks:
    """Processes that wait for `release`; those that were not released end with the `with` block."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[socket.socket] = []
        # The user sees what the first rank prints; what the others print goes to the launcher's log.
        self._said = tempfile.TemporaryFile()
        self._signals: list[tuple[int, float]] = []

    @classmethod
    def start(cls, command: Command) -> Self:
        """Start every rank of `command`, each as the leader of a session of its own."""
        held = cls()
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
            held.end()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return held

    @property
    def waits(self) -> bool:
        """Whether they have not been released yet."""
        return bool(self._channels)

    def until_checked(self) -> int:
        """Wait for the first rank's checks: 0 once they pass, else the exit code of this command."""
        with self._noting_signals():
            while not self._signals:
                ready, _, _ = select.select(self._channels[:1], [], [], POLL_S)
                if ready and self._channels[0].recv(len(CHECKED)) == CHECKED:
                    return 0
                if any(process.poll() is not None for process in self.processes):
                    return self._failed()
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
            say(f"the run failed before its checks were done: rank {rank} {describe_status(status)}")
        return code or 1

    def _stopped(self) -> int:
        """Let the first rank remove what it has half built, for some seconds or until the next signal."""
        number, since = self._signals[0]
        self.processes[0].terminate()
        while self.processes[0].poll() is None and len(self._signals) == 1 and time.monotonic() - since < PATIENCE_S:
            time.sleep(POLL_S)
        self.end()
        return _told(number)

    @contextmanager
    def _noting_signals(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append((number, time.monotonic()))

        before = {number: signal.signal(number, note) for number in PASSED_ON}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.waits:
            self.end()
        self._said.close()


def _told(number: int) -> int:
    """Print one line, as every command does that a signal ends; the exit code."""
    say("stopped" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}")
    return EXIT_PREEMPTED if number == signal.SIGUSR1 else 128 + number
