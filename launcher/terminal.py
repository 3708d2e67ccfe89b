"""The way from rank 0 to the user's terminal: a named pipe, copied by a thread.

DeepSpeed's launcher closes inherited descriptors and mixes its own lines into what it passes on; the pipe lets rank 0's
lines through and nothing else.
"""

import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

SHOW_CURSOR = b"\x1b[?25h"


class ConsolePipe:
    """A named pipe whose bytes appear on this process's stdout until the `with` block ends."""

    def __init__(self) -> None:
        # Not in the run's folder: network file systems do not all have pipes.
        self._folder = Path(tempfile.mkdtemp(prefix="zerolora-"))
        self.path = self._folder / "console"
        os.mkfifo(self.path, 0o600)
        self._read_fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        # A writer of our own keeps the pipe from ending before rank 0 has opened it, and ends it when we say so.
        self._write_fd = os.open(self.path, os.O_WRONLY)
        os.set_blocking(self._read_fd, True)
        self._line_is_open = False
        self._thread = threading.Thread(target=self._copy, name="console", daemon=True)
        self._thread.start()

    def arguments(self) -> list[str]:
        """What a rank is told: where to write, and what kind of terminal that ends on."""
        told = ["--console", str(self.path)]
        if os.isatty(1):
            told += ["--console-width", str(shutil.get_terminal_size().columns), "--console-tty"]
        return told

    def _copy(self) -> None:
        while chunk := os.read(self._read_fd, 65536):
            self._line_is_open = not chunk.endswith(b"\n")
            _write(chunk)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write_fd)
        # Ends at once, for all writers are gone; a rank that could not be killed must not keep the user waiting.
        self._thread.join(timeout=5.0)
        shutil.rmtree(self._folder, ignore_errors=True)
        if os.isatty(1):
            # A rank killed while its progress bar was up has left the cursor hidden and the line open.
            _write(SHOW_CURSOR + (b"\n" if self._line_is_open else b""))


def say(message: str) -> None:
    """A line of the launcher's own on stderr, whatever has become of stderr."""
    try:
        print(message, file=sys.stderr, flush=True)
    except OSError:
        pass  # the terminal is closed; the run goes on, and launcher.log has the rest


def _write(data: bytes) -> None:
    """All of `data` to stdout; a terminal that has gone away must not stop the run."""
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        pass
