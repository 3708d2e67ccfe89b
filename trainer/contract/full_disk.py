"""Recognition of writes that failed because of the disk, and their error messages."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
_RUST = re.compile(r"\(os error (\d+)\)")  # safetensors and tokenizers have the number only in their message


def disk_error(error: BaseException) -> str | None:
    """Return the system's message for a write error of a disk; None for other errors."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (found := _RUST.search(str(error))):
        number = int(found[1])
    return os.strerror(number) if number in DISK_ERRORS else None


def describe_disk(path: Path) -> str:
    """Describe the disk of a path: its mount point and free space."""
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    while not folder.is_mount():
        folder = folder.parent
    return f"the disk at {folder}, {usage.free / 2**30:.2f} of {usage.total / 2**30:.1f} GiB free"


@contextmanager
def collect_disk_errors(failures: list[str], path: Path) -> Iterator[None]:
    """Append disk errors of the block to `failures` instead of raising them; `path` is on the disk."""
    try:
        yield
    except Exception as error:  # tokenizers raises plain Exception
        reason = disk_error(error)
        if reason is None:
            raise
        failures.append(f"{reason} ({describe_disk(path)})")
