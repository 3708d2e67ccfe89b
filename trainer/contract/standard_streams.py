"""Standard input, output and error of a process whose terminal may be closed, full, or gone."""

import io
import os
from typing import Any, TextIO


class _Forgiving(io.FileIO):
    """A file whose writes never fail: what cannot be written is lost, and no print ends a run."""

    def write(self, data: Any) -> int:
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
