"""Show rank 0's output on the user's terminal: through a named pipe, or a file if rank 0 may be on another host.

DeepSpeed's launcher closes inherited descriptors and adds its own lines to the output that it forwards; a pipe or file
has only the lines of rank 0.
"""

import os
import shutil
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

from trainer.config.errors import printable

SHOW_CURSOR = b"\x1b[?25h"
FOLLOW_S = 0.2


class _Console:
    """A path for rank 0's output, which is copied to this process's stdout."""

    def __init__(self, logs: Path, path: Path) -> None:
        self._logs, self.path = logs, path
        self._is_lost = False

    def arguments(self) -> list[str]:
        """Return the options that give a rank this path, and the width of the terminal."""
        terminal = ["--console-width", str(shutil.get_terminal_size().columns), "--console-tty"]
        return ["--console", str(self.path), *(terminal if os.isatty(1) else [])]

    def _show(self, chunk: bytes) -> None:
        if not _write(chunk) and not self._is_lost:
            self._is_lost = True
            with suppress(OSError), (self._logs / "launcher.log").open("a") as log:
                log.write("standard output can no longer be written; training continues without it\n")

    def __enter__(self) -> Self:
        return self


class ConsolePipe(_Console):
    """A named pipe, copied to this process's stdout until the `with` block ends."""

    def __init__(self, logs: Path) -> None:
        # Not in the run's folder, because some network file systems have no pipes.
        self._folder = Path(tempfile.mkdtemp(prefix="zerolora-"))
        super().__init__(logs, self._folder / "console")
        os.mkfifo(self.path, 0o600)
        self._read_fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        # This writer keeps the pipe open until rank 0 has opened it and `__exit__` closes it.
        self._write_fd = os.open(self.path, os.O_WRONLY)
        os.set_blocking(self._read_fd, True)
        self._line_is_open = False
        self._thread = threading.Thread(target=self._copy, name="console", daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        while chunk := os.read(self._read_fd, 65536):
            self._line_is_open = not chunk.endswith(b"\n")
            self._show(chunk)

    def __exit__(self, *error: object) -> None:
        os.close(self._write_fd)
        # Returns at once if all writers have ended. The timeout is for ranks that cannot be killed.
        self._thread.join(timeout=5.0)
        shutil.rmtree(self._folder, ignore_errors=True)
        if os.isatty(1):
            # A rank killed while it showed a progress bar has left the cursor hidden and the line incomplete.
            _write(SHOW_CURSOR + (b"\n" if self._line_is_open else b""))


class ConsoleFile(_Console):
    """A file in the run's folder, for rank 0 on any host; appended bytes are copied to this process's stdout."""

    def __init__(self, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        super().__init__(logs, self.console_path(logs))
        self.path.touch()
        self._shown = self.path.stat().st_size
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="console", daemon=True)
        self._thread.start()

    @staticmethod
    def console_path(logs: Path) -> Path:
        return logs.absolute() / "console.log"

    def _follow(self) -> None:
        ending = False
        while True:
            with suppress(OSError):  # the file server does not respond; try again later
                self._show_new()
            if ending:
                return
            ending = self._ended.wait(FOLLOW_S)

    def _show_new(self) -> None:
        # Opened each time, because a file stays unusable after its folder was remounted.
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._shown)
            while chunk := file.read(65536):
                self._shown += len(chunk)
                self._show(chunk)

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join(timeout=5.0)
        if os.isatty(1):
            _write(SHOW_CURSOR)


def say(message: str) -> None:
    """Print a message of the launcher on stderr; ignore a closed stderr."""
    with suppress(OSError):  # the terminal is closed, but the run continues
        _clear_line()
        print(printable(message), file=sys.stderr, flush=True)


def show(line: str) -> None:
    """Print a progress line of the launcher on stdout, among those of rank 0."""
    with suppress(OSError):
        _clear_line()
        sys.stdout.flush()
    _write(f"{printable(line)}\n".encode(errors="replace"))


def _clear_line() -> None:
    """Clear the progress that rank 0 shows on the terminal's last line while it imports (standard_streams.py)."""
    if os.isatty(2):
        os.write(2, b"\r\x1b[2K")


def _write(data: bytes) -> bool:
    """Write all of `data` to stdout; return False for errors, because the run must continue."""
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        return False
    return True
