"""Run a command; on signal N, exit with code 128 + N and a one-line message instead of a traceback.

Used by launcher/cli.py and launcher/module.py. Imports little, so that signals are handled early.
"""

import io
import logging
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from trainer.contract.exit_codes import EXIT_FAILED, EXIT_PREEMPTED, get_signal_exit_code
from trainer.contract.standard_streams import PROGRESS, open_closed_descriptors, open_forgiving_stream

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class SignalInterrupt(BaseException):
    """Raised when a signal arrives."""


class SignalHandler:
    """Raises an exception at the first signal and exits at the second."""

    def __init__(self, exception: type[BaseException]) -> None:
        self._exception = exception
        self._process = os.getpid()
        self.number = 0
        for number in SIGNALS:
            signal.signal(number, self._handle_signal)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if self.number or os.getpid() != self._process:
            os._exit(get_signal_exit_code(number))  # on a second signal, or in a worker forked by a library
        self.number = number
        raise self._exception

    def report(self) -> int:
        name = signal.Signals(self.number).name
        print("stopped" if self.number == signal.SIGINT else f"stopped by {name}", file=sys.stderr)
        return get_signal_exit_code(self.number)


class _Output(io.FileIO):
    error: OSError | None = None

    def write(self, data: Any) -> int:
        PROGRESS.clear()
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


def run(command: Callable[[], int], *, exception: type[BaseException] = KeyboardInterrupt) -> int:
    """Run `command` and return its exit code.

    A signal raises `exception` in the command and is reported in one line, even if a library replaces that exception.
    A failed write to standard output is reported in one line with exit code 1; errors on standard error are ignored.
    """
    open_closed_descriptors()
    sys.stdin = sys.stdin or open(0, closefd=False)  # Python sets None if it was closed
    handler, output = SignalHandler(exception), _Output(1, "w", closefd=False)
    encoding, errors = getattr(sys.stdout, "encoding", "utf-8"), getattr(sys.stdout, "errors", "replace")
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(output), encoding=encoding, errors=errors, line_buffering=output.isatty()
    )
    sys.stderr = open_forgiving_stream(2, "backslashreplace")
    try:
        try:
            code = command()
        except SystemExit as error:
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        sys.stdout.flush()
    except BaseException:
        # Libraries convert an interrupted import to an error of their own.
        if not handler.number and output.error is None:
            raise
        code = EXIT_FAILED
    PROGRESS.clear()
    if handler.number and code < 128 and code != EXIT_PREEMPTED:
        return handler.report()
    return code if output.error is None else _report_output_error(output.error)


def _report_output_error(error: OSError) -> int:
    """Report a failed write to standard output, unless the reader closed the pipe, and return the exit code."""
    # Discard buffered output, which Python flushes at exit.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE  # as with `| head -1`
    print(f"error: standard output: {error.strerror}; the output is incomplete", file=sys.stderr)
    return EXIT_FAILED


def silence_libraries() -> None:
    """Silence library warnings about missing GPUs, Hub retries and slow CPU kernels; call before importing them."""
    for name in ("DeepSpeed", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.ERROR)
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
