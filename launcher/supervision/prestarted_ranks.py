"""Prestarted ranks: ranks on this machine that start before the checks and train once they pass.

Rank 0 runs the checks, so no separate process has to import the libraries. A run that fails or is stopped
before the checks pass has written nothing to its folder.
"""

import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO, Any, Self

import psutil

from launcher.supervision.failure_report import describe_status
from launcher.supervision.processes import is_stopped, kill_sessions
from launcher.supervision.terminal import log
from launcher.targets.local import Command
from trainer.contract.exit_codes import EXIT_FAILED, FORWARDED_SIGNALS, get_signal_exit_code, to_exit_code
from trainer.contract.rank_arguments import CHECKED_MESSAGE, PRESTARTED, StartMessage
from trainer.contract.rendezvous import get_host_name

POLL_S = 0.05
TIMEOUT_S = 10.0
CHECKS_FAILED = "the run failed during its checks"
_SIGNALS_BY_CODE = {get_signal_exit_code(number): number for number in FORWARDED_SIGNALS}


class PrestartedRanks:
    """Starts ranks that wait for `start_training`; leaving the `with` block kills those still waiting."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[socket.socket] = []
        # Rank 0 writes to the terminal; the other ranks' output is copied to the launcher's log.
        self._output = tempfile.TemporaryFile()
        self._signals: list[tuple[int, float]] = []
        self._handlers: dict[int, Any] = {}

    @classmethod
    def start(cls, command: Command) -> Self:
        """Start every rank of `command` in its own session.

        Signals are only recorded until `wait_for_checks`: an exception in a handler would leave orphaned ranks.
        """
        ranks = cls()

        def record(number: int, frame: FrameType | None) -> None:
            ranks._signals.append((number, time.monotonic()))

        ranks._handlers = {number: signal.signal(number, record) for number in FORWARDED_SIGNALS}
        # A rank unblocks SIGINT once it can exit without a traceback.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            for variables in command.rank_environments:
                ours, theirs = socket.socketpair()
                with theirs:
                    ranks._channels.append(ours)
                    output = ranks._output if ranks.processes else None
                    argv = (*command.argv, PRESTARTED)
                    ranks.processes.append(command.start_process(argv, variables, theirs.fileno(), output, output))
        except BaseException:
            ranks.__exit__()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return ranks

    @property
    def is_waiting(self) -> bool:
        return bool(self._channels)

    def wait_for_checks(self, hang_timeout_minutes: float = 0.0) -> int:
        """Wait until rank 0 has run the checks; return 0 if they pass, otherwise this command's exit code.

        There is no time limit, but a rank stopped (SIGSTOP) for `hang_timeout_minutes` counts as a failure (0: never).
        """
        try:
            code = self._wait(hang_timeout_minutes * 60.0)
        finally:
            self._restore_handlers()
        return self._stop() if not code and self._signals else code

    def _wait(self, hang_timeout_s: float) -> int:
        stopped_s = [0.0] * len(self.processes)
        while not self._signals:
            ready, _, _ = select.select(self._channels[:1], [], [], POLL_S)
            if ready and self._channels[0].recv(len(CHECKED_MESSAGE)) == CHECKED_MESSAGE:
                return 0
            if any(process.poll() is not None for process in self.processes):
                return self._report_failure()
            for rank, process in enumerate(self.processes if hang_timeout_s else ()):
                stopped_s[rank] = stopped_s[rank] + POLL_S if is_stopped(psutil.Process(process.pid)) else 0.0
                if stopped_s[rank] > hang_timeout_s:
                    where = f"rank {rank} on {get_host_name()}"
                    log(f"{CHECKS_FAILED}: the run is hung: {where} is stopped (SIGSTOP, or a debugger)")
                    self.kill()
                    return EXIT_FAILED
        return self._stop()

    def start_training(self, arguments: Sequence[str], log: IO[bytes]) -> list[subprocess.Popen[bytes]]:
        self._output.seek(0)
        log.write(self._output.read())
        log.flush()
        for channel in self._channels:
            StartMessage(list(arguments), str(log.name)).send(channel)
        self._channels = []
        return self.processes

    def kill(self) -> None:
        kill_sessions([process.pid for process in self.processes])
        for process in self.processes:
            process.wait()
        for channel in self._channels:
            channel.close()
        self._channels = []

    def _report_failure(self) -> int:
        statuses = enumerate(process.poll() for process in self.processes)
        rank, status = next((rank, status) for rank, status in statuses if status is not None)
        code = to_exit_code(status)
        if code in _SIGNALS_BY_CODE:
            return _report_stop(_SIGNALS_BY_CODE[code])
        if rank or status <= 0:
            self._output.seek(0)
            log(self._output.read().decode(errors="replace").rstrip())
            log(f"{CHECKS_FAILED}: rank {rank} on {get_host_name()} {describe_status(status)}")
        return code or 1

    def _stop(self) -> int:
        """Terminate rank 0, wait up to TIMEOUT_S or until a second signal, kill all ranks, and return the exit code."""
        number, since = self._signals[0]
        self.processes[0].terminate()
        while self.processes[0].poll() is None and len(self._signals) == 1 and time.monotonic() - since < TIMEOUT_S:
            time.sleep(POLL_S)
        self.kill()
        return _report_stop(number)

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_waiting:
            self.kill()
        self._restore_handlers()
        self._output.close()


def _report_stop(number: int) -> int:
    log("stopped" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}")
    return get_signal_exit_code(number)
