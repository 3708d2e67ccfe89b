"""Show rank 0's output on the user's terminal: rank 0 inherits stdout, or writes to a file if it may be remote.

srun, mpirun and pdsh add their own lines to the output that they forward; the file contains only rank 0's output.
"""

import os
import shutil
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

from trainer.config.errors import sanitize

FOLLOW_S = 0.2


def share_stdout() -> int:
    """Duplicate stdout for child processes to inherit, and return the new file descriptor."""
    descriptor = os.dup(1)
    os.set_inheritable(descriptor, True)
    return descriptor


class ConsoleFile:
    """Copies rank 0's output to stdout from a file in the run's folder, so rank 0 can run on any host."""

    def __init__(self, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs, self.path = logs, self.get_path(logs)
        self._is_stdout_lost = False
        self.path.touch()
        self._shown = self.path.stat().st_size
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="console", daemon=True)
        self._thread.start()

    @staticmethod
    def get_path(logs: Path) -> Path:
        return logs.absolute() / "console.log"

    def build_arguments(self) -> list[str]:
        terminal = ["--console-width", str(shutil.get_terminal_size().columns), "--console-tty"]
        return ["--console", str(self.path), *(terminal if os.isatty(1) else [])]

    def __enter__(self) -> Self:
        return self

    def _follow(self) -> None:
        ending = False
        while True:
            with suppress(OSError):  # the file server does not respond; try again later
                # Open the file each time, because an open file becomes unusable when its folder is remounted.
                with self.path.open("rb", buffering=0) as file:
                    file.seek(self._shown)
                    while chunk := file.read(65536):
                        self._shown += len(chunk)
                        if not _write_to_stdout(chunk) and not self._is_stdout_lost:
                            self._is_stdout_lost = True
                            with suppress(OSError), (self._logs / "launcher.log").open("a") as log:
                                log.write("cannot write to standard output any more; training continues without it\n")
            if ending:
                return
            ending = self._ended.wait(FOLLOW_S)

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join(timeout=5.0)


def restore_terminal() -> None:
    """Show the cursor again and clear the progress bar left by a killed rank."""
    if os.isatty(1):
        _write_to_stdout(b"\r\x1b[2K\x1b[?25h")


def log(message: str) -> None:
    """Print a launcher message to stderr; ignore a closed stderr."""
    with suppress(OSError):  # the terminal is closed, but the run continues
        _clear_line()
        print(sanitize(message), file=sys.stderr, flush=True)


def print_progress(line: str) -> None:
    with suppress(OSError):
        _clear_line()
        sys.stdout.flush()
    _write_to_stdout(f"{sanitize(line)}\n".encode(errors="replace"))


def _clear_line() -> None:
    """Clear the progress line that rank 0 shows on the terminal while importing (standard_streams.py)."""
    if os.isatty(2):
        os.write(2, b"\r\x1b[2K")


def _write_to_stdout(data: bytes) -> bool:
    """Write all of `data` to stdout; return False on an error instead of raising, because the run must continue."""
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        return False
    return True
