"""What a launcher below this one (srun, mpirun, pdsh) writes into logs/launcher.log: read once, as it grows."""

import re
from contextlib import suppress
from pathlib import Path

from launcher.supervision.stop_signals import STOPPED

# Of DeepSpeed's launcher on a host, once one of its ranks has failed.
_FAILURE = b"Killing subprocess"
# "srun: error: n2: task 1: Exited with exit code 1", "srun: error: n2: tasks 0-7: Killed"; also of lost nodes.
_SRUN_FAILURE = re.compile(rb"^srun: error: .*?(?:[Tt]ask|Node).*?(?:exit code (\d+))?$")
# "pdsh@login: n2: ssh exited with exit code 255": also of a host on which nothing was started.
_PDSH_FAILURE = re.compile(rb"^pdsh@\S+: \S+: ssh exited with exit code (\d+)$")


class LauncherLog:
    """The part of the file that is written from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin = self._read = path.stat().st_size
        self._unfinished = b""
        self._text = ""

    def tells_of_failure(self) -> bool:
        """Whether a line that was written since the last look says that a rank, or a host, has failed."""
        try:
            new = self._from(self._read)
        except OSError:
            return False  # the file server is gone for now
        self._read += len(new)
        *lines, self._unfinished = (self._unfinished + new).split(b"\n")
        return any(_is_failure(line) for line in lines)

    def text(self) -> str:
        """All of it; as it was read last while the file server is gone."""
        with suppress(OSError):
            self._text = self._from(self._begin).decode(errors="replace")
        return self._text

    def _from(self, offset: int) -> bytes:
        with self._path.open("rb") as file:
            file.seek(offset)
            return file.read()


def _is_failure(line: bytes) -> bool:
    found = _SRUN_FAILURE.match(line) or _PDSH_FAILURE.match(line)
    return _FAILURE in line or (found is not None and int(found[1] or 1) not in STOPPED)
