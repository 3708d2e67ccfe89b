"""Check that a result file can be written before the result is computed; describe disk errors."""

import errno
import os
import re
import shutil
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.config import UserError
from trainer.config.files import describe_broken_link, read_bytes, read_json_or_default

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
# safetensors and tokenizers report the number only in their messages.
_RUST_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def check_output_file(path: Path, label: str) -> None:
    """Raise UserError, prefixed with `label`, if no file can be written at `path`."""
    folder = path.absolute().parent
    if problem := describe_broken_link(path):
        raise UserError(f"{label}: {problem}; fix the link, or use another file")
    try:
        if path.is_dir():
            raise UserError(f"{label}: is a folder; use a file in it, such as {path / 'result'}{path.suffix}")
        if path.exists() and not path.is_file():  # the final rename would replace it
            raise UserError(f"{label}: is a device or a pipe; use a file")
        if not folder.is_dir():
            raise UserError(f"{label}: its folder does not exist; create it first")
        allowed = os.access(path, os.W_OK) if path.exists() else os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:  # for example, the name is too long
        raise UserError(f"{label}: {error.strerror}; use another file") from None
    if not allowed:
        raise UserError(f"{label}: no permission to write; use a file in another folder")


def check_result_file(path: Path, label: str, keys: Set[str]) -> None:
    """Call `check_output_file`; also reject an existing file unless it is a JSON object with these keys."""
    check_output_file(path, label)
    if not path.is_file() or not path.stat().st_size:
        return
    if not keys <= read_json_or_default(path, dict[str, Any], {}).keys():
        raise UserError(f"{label}: already exists with other content; use another file, or remove this one")


def check_settings_file(path: Path, label: str, *, force: bool) -> None:
    """Call `check_output_file`; also reject an existing file, unless `force` is set and zerolora wrote it."""
    check_output_file(path, label)
    if path.exists() and not force:
        raise UserError(f"{label}: already exists; use another file, or add --force")
    if path.exists() and path.stat().st_size and not read_bytes(path).startswith(b"# zerolora train "):
        raise UserError(f"{label}: was not written by zerolora; use another file, or remove this one")


def describe_disk_error(error: BaseException) -> str | None:
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (match := _RUST_OS_ERROR.search(str(error))):
        number = int(match[1])
    return os.strerror(number) if number in DISK_ERRORS else None


def describe_disk(path: Path) -> str:
    folder = next(above for above in (path.absolute(), *path.absolute().parents) if above.exists())
    usage = shutil.disk_usage(folder)
    while not folder.is_mount():
        folder = folder.parent
    return f"the disk at {folder}, {usage.free / 2**30:.2f} of {usage.total / 2**30:.1f} GiB free"


@contextmanager
def collect_disk_errors(failures: list[str], path: Path) -> Iterator[None]:
    """Append disk errors in the block to `failures` instead of raising them; `path` is any path on that disk."""
    try:
        yield
    except Exception as error:  # tokenizers raises plain Exception
        reason = describe_disk_error(error)
        if reason is None:
            raise
        failures.append(f"{reason} ({describe_disk(path)})")
