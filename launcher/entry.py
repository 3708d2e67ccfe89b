"""How commands begin and end, whatever they do: a signal is one line and 128 + its number, never a traceback.

launcher/cli.py and launcher/module.py run commands by it. Nothing heavy is imported here: signals are handled early.
"""

import io
import logging
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from trainer.contract.exit_codes import EXIT_FAILED, EXIT_PREEMPTED, exit_code_after
from trainer.contract.standard_streams import PROGRESS, forgiving_stream, open_closed_descriptors

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stopped(BaseException):
    """A signal has come."""


class Ending:
    """What to do about signals until the command has ended."""

    def __init__(self, exception: type[BaseException]) -> None:
        self._exception = exception
        self._process = os.getpid()
        self.number = 0
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number or os.getpid() != self._process:
            os._exit(exit_code_after(number))  # asked again; or a worker that a library has forked
        self.number = number
        raise self._exception

    def tell(self) -> int:
        """One line; the exit code."""
        name = signal.Signals(self.number).name
        print("stopped" if self.number == signal.SIGINT else f"stopped by {name}", file=sys.stderr)
        return exit_code_after(self.number)


class _Output(io.FileIO):
    """Standard output that remembers why it could not be written."""

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

    A signal becomes `exception` in it, and one line here whatever it is turned into. A standard output that cannot be
    written is one line and exit code 1, standard error is written as far as it goes.
    """
    open_closed_descriptors()
    ending, output = Ending(exception), _Output(1, "w", closefd=False)
    encoding, errors = getattr(sys.stdout, "encoding", "utf-8"), getattr(sys.stdout, "errors", "replace")
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(output), encoding=encoding, errors=errors, line_buffering=output.isatty()
    )
    sys.stderr = forgiving_stream(2, "backslashreplace")
    try:
        try:
            code = command()
        except SystemExit as error:
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        sys.stdout.flush()
    except BaseException:
        # Libraries turn an interrupt in the middle of an import into an error of their own.
        if not ending.number and output.error is None:
            raise
        code = EXIT_FAILED
    PROGRESS.clear()
    if ending.number and code < 128 and code != EXIT_PREEMPTED:
        return ending.tell()
    return code if output.error is None else _told(output.error)


def _told(error: OSError) -> int:
    """The exit code where not everything could be printed, after a line where that is a mistake."""
    # What is still to be flushed at the end of the process goes nowhere.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE  # `| head -1` has read what it wanted
    print(f"error: standard output: {error.strerror}; what was printed is not complete", file=sys.stderr)
    return EXIT_FAILED


def quiet_libraries() -> None:
    """Before they are imported: DeepSpeed finds no GPU, the hub tries again, bitsandbytes wants a faster CPU kernel."""
    for name in ("DeepSpeed", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.ERROR)
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
