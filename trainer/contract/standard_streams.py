"""Standard streams that tolerate a closed terminal or a full disk, and the progress line."""

import io
import os
import shutil
from contextlib import suppress
from typing import Any, TextIO


class Progress:
    """Shows a progress line on a terminal, such as `importing ...`, until the command prints its output.

    The streams in this module and launcher/entry.py erase it. A pipe or file only receives text shown with `on_pipe`.
    """

    def __init__(self) -> None:
        self._is_shown = False

    def show(self, text: str, *, on_pipe: bool = False) -> None:
        if os.environ.get("TERM") != "dumb" and os.isatty(2):
            width = shutil.get_terminal_size().columns - 5
            self._write("".join(filter(str.isprintable, text))[:width] + " ...")
            self._is_shown = True
        elif on_pipe:
            with suppress(OSError):
                os.write(2, f"{text} ...\n".encode())

    def clear(self) -> None:
        if self._is_shown:
            self._is_shown = False
            self._write("")

    def _write(self, text: str) -> None:
        with suppress(OSError):
            os.write(2, f"\r\x1b[2K{text}".encode())


PROGRESS = Progress()


class _ForgivingFile(io.FileIO):
    """A file that ignores write errors, so that no print can stop a run."""

    def write(self, data: Any) -> int:
        PROGRESS.clear()
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def open_forgiving_stream(descriptor: int, errors: str = "replace") -> TextIO:
    raw = io.BufferedWriter(_ForgivingFile(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=True)


def open_closed_descriptors() -> None:
    """Point closed standard descriptors (`>&-`) at /dev/null, so that other files do not reuse their numbers.

    Standard output is read-only, so writes to it still fail and commands can react.
    """
    for descriptor, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, mode)  # uses the lowest free descriptor
