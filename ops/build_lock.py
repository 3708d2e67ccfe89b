"""One builder of the operators at a time."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_POLL_SECONDS = 0.2


@contextmanager
def build_lock(path: Path) -> Iterator[None]:
    """One builder per node: the others wait here and find the result.

    The lock is the system's (flock) and ends with its process: a build that was killed leaves a file, but no lock. The
    file names the holder for those who wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as file:
        announced = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not announced:
                    file.seek(0)
                    holder = file.read().strip() or "?"
                    print(f"waiting for process {holder}, which builds the operators ({path})", flush=True)
                    announced = True
                time.sleep(LOCK_POLL_SECONDS)
        file.truncate(0)
        file.write(f"{os.getpid()}")
        file.flush()
        yield
        file.truncate(0)
