"""A write that failed because of the disk: recognised whatever library wrote, and told with the disk's name."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
_RUST = re.compile(r"\(os error (\d+)\)")  # safetensors and tokenizers have the number in their text only


def disk_error(error: BaseException) -> str | None:
    """The system's words for what a disk refused; None for an error of another kind."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (found := _RUST.search(str(error))):
        number = int(found[1])
    return os.strerror(number) if number in OF_THE_DISK else None


def disk_of(path: Path) -> str:
    """The disk that a path lies on: where it is mounted, and how much of it is free."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    usage = shutil.disk_usage(there)
    while not there.is_mount():
        there = there.parent
    return f"the disk at {there}, {usage.free / 2**30:.2f} of {usage.total / 2**30:.1f} GiB free"


@contextmanager
def disk_errors_into(failures: list[str], path: Path) -> Iterator[None]:
    """Note in `failures` a write that the disk of `path` refused, instead of raising it."""
    try:
        yield
    except Exception as error:  # tokenizers raises plain Exception
        reason = disk_error(error)
        if reason is None:
            raise
        failures.append(f"{reason} ({disk_of(path)})")
