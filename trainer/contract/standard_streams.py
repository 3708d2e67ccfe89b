"""Standard input, output and error of a process whose terminal may be closed, full, or gone."""

import io
import os
import shutil
from contextlib import suppress
from typing import Any, TextIO


class Progress:
    """One line on a terminal that says what a command does before it prints anything: importing, loading.

    The streams of this module and of launcher/entry.py clear it; nothing of it is in a pipe or a file.
    """

    def __init__(self) -> None:
        self._is_shown = False

    def show(self, text: str) -> None:
        """Show `text` in place of what is shown."""
        if os.environ.get("TERM") != "dumb" and os.isatty(2):
            room = shutil.get_terminal_size().columns - 5
            self._write("".join(filter(str.isprintable, text))[:room] + " ...")
            self._is_shown = True

    def clear(self) -> None:
        """Remove the line."""
        if self._is_shown:
            self._is_shown = False
            self._write("")

    def _write(self, text: str) -> None:
        with suppress(OSError):
            os.write(2, f"\r\x1b[2K{text}".encode())


# One for the process, as there is one terminal.
PROGRESS = Progress()


class _Forgiving(io.FileIO):
    """A file whose writes never fail: what cannot be written is lost, and no print ends a run."""

    def write(self, data: Any) -> int:
        PROGRESS.clear()
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def forgiving_stream(descriptor: int, errors: str = "replace") -> TextIO:
    """Return a text stream that writes each line at once to a descriptor, and never fails."""
    raw = io.BufferedWriter(_Forgiving(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=True)


def open_closed_descriptors() -> None:
    """Open standard descriptors that are closed (`>&-`), which the next files would otherwise get.

    Writes to standard output still fail, so that a command knows; what goes to standard error is lost.
    """
    for descriptor, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, mode)  # gets the lowest number that is free
