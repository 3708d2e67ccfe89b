"""Keep zerolora's console output separate from the output of libraries.

A rank's file descriptors 1 and 2 are redirected to `logs/rank-N.log` before heavy imports, so that all prints,
warnings, log records and messages from C++ and NCCL go there. Only the Console returned by `open_console` still reaches
the terminal, and only on rank 0.
"""

import faulthandler
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.markup import escape

from trainer.config.errors import format_count
from trainer.contract.standard_streams import open_forgiving_stream

LOG_WIDTH = 120
MAX_REPEATED = 10
"""Maximum number of warnings printed again at the end of a run."""


class _ConsoleStream:
    """A text stream to the terminal that switches to the log once writing to the terminal fails.

    A closed terminal, a `zerolora train` that has exited or a full disk behind `> out.txt` must not stop a run.
    """

    encoding = "utf-8"

    def __init__(self, fd: int, *, terminal: bool) -> None:
        self._fd = fd
        self._terminal = terminal

    def write(self, text: str) -> int:
        unsent = text.encode(self.encoding, "replace")
        while unsent:
            try:
                unsent = unsent[os.write(self._fd, unsent) :]
            except OSError:
                if self._fd == 1:
                    break  # the log's disk is also full
                os.close(self._fd)
                self._fd, self._terminal = 1, False
                unsent = b"cannot write to standard output any more; training continues without it\n" + unsent
        return len(text)

    def flush(self) -> None:
        """Do nothing: `write` is unbuffered."""

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return self._terminal


def open_console(
    run_dir: Path, rank: int, console_path: str | None, *, width: int | None = None, terminal: bool = False
) -> Console:
    """Redirect this process's descriptors 1 and 2 to `run_dir/logs/rank-N.log`; return the console for our output.

    Rank 0 writes to the original stdout, or to `console_path`: the number of an inherited descriptor, or a file, which
    is treated as a terminal of `width` columns if `terminal` is set. Other ranks write to their logs. Call this once,
    before importing torch.

    Raises OSError if the log or `console_path` cannot be opened.
    """
    screen_fd = _open_console_fd(console_path) if rank == 0 else None
    log_path = run_dir / "logs" / f"rank-{rank}.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    redirect_output_to(log_path)
    # Open new line-buffered streams: the old ones are block-buffered if they were opened on a pipe.
    sys.stdout = open_forgiving_stream(1)
    sys.stderr = open_forgiving_stream(2, "backslashreplace")
    faulthandler.enable(file=sys.stderr)
    print(f"== {time.strftime('%Y-%m-%d %H:%M:%S')}  rank {rank}  process {os.getpid()} ==", flush=True)

    if screen_fd is None:
        return _build_console(_ConsoleStream(1, terminal=False), LOG_WIDTH)
    is_terminal = terminal or os.isatty(screen_fd)
    if width is None:
        # Query the terminal itself: rich would query descriptors 0 to 2, two of which are now the log.
        width = os.get_terminal_size(screen_fd).columns if os.isatty(screen_fd) else LOG_WIDTH
    return _build_console(_ConsoleStream(screen_fd, terminal=is_terminal), width)


class Output:
    """Prints a run's messages on rank 0: all messages to the log, and the important ones to the console.

    Until the first step clears `is_starting`, the console shows only warnings and messages passed to
    `print_always`. Afterwards, or if `verbose` is set, it shows all messages. Messages that begin with
    `[yellow]` or `warning:` are warnings.
    """

    def __init__(self, console: Console, *, is_main: bool, verbose: bool, name: str = "") -> None:
        self._name = f"{escape(name)}: " if name else ""
        self.console, self._is_main, self._verbose = console, is_main, verbose
        self.is_starting = self.shows_start = True
        self.warnings: list[str] = []

    def __call__(self, message: Any) -> None:
        if isinstance(message, str) and message.startswith("warning:"):
            message = f"[yellow]warning:[/yellow]{escape(message.removeprefix('warning:'))}"
        is_warning = isinstance(message, str) and message.startswith("[yellow]")
        if is_warning and message not in self.warnings:
            self.warnings.append(message)
        self._print(message, on_console=is_warning or self._verbose or not self.is_starting)

    def print_always(self, message: str) -> None:
        """Print a message even before the first step, unless another adapter in the same run prints it."""
        self._print(message, on_console=self.shows_start or self._verbose)

    def repeat_warnings(self) -> None:
        """Print the warnings again, because later output has scrolled them out of view."""
        count = len(self.warnings)
        if count:
            self.print_always(f"{format_count(count, 'warning')} in this run:")
        for message in self.warnings[:MAX_REPEATED]:
            self.print_always(message)
        if count > MAX_REPEATED:
            self.print_always(f"... and {count - MAX_REPEATED} more, in logs/rank-0.log")

    def _print(self, message: Any, *, on_console: bool) -> None:
        if self._name and isinstance(message, str):
            message = f"{self._name}{message}"
        screen = self.console.file
        has_log = isinstance(screen, _ConsoleStream)
        if self._is_main and (on_console or (has_log and screen.fileno() == 1)):
            self.console.print(message, soft_wrap=True)
        # Descriptor 1 is the log. If the terminal was closed, the console has already written the message there.
        if self._is_main and has_log and screen.fileno() != 1:
            _build_console(sys.stdout, LOG_WIDTH).print(message, soft_wrap=True)


def warn(console: Console, message: str) -> None:
    """Print a warning without wrapping, so that logs can be searched for it."""
    console.print(f"[yellow]warning:[/yellow] {escape(message)}", soft_wrap=True)


def _build_console(screen: _ConsoleStream | TextIO, width: int) -> Console:
    # Terminals of unknown size report 0 columns.
    return Console(
        file=cast(TextIO, screen),
        width=width or LOG_WIDTH,
        height=25,
        force_terminal=screen.isatty(),
        highlight=False,
        emoji=False,
    )


def _open_console_fd(console_path: str | None) -> int:
    if console_path is None:
        return os.dup(1)
    if console_path.isdecimal():
        return int(console_path)
    return os.open(console_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def redirect_output_to(log: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
