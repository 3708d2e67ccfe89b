"""Write small files atomically.

The content is written to a temporary file in the same folder, synced, and renamed to the final name. The
old file stays intact if the process is killed or the host loses power.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

FSYNC_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)


def write_text_atomic(path: Path, text: str) -> None:
    """Replace the content of `path` atomically, keeping links and the permissions of an existing file."""
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            if path.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically. Raises ValueError for NaN and infinity, which are not valid JSON."""
    write_text_atomic(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def apply_umask(path: Path) -> None:
    """Apply the umask to a file or all files below a folder, because safetensors creates private files."""
    folder = path if path.is_dir() else path.parent
    probe = folder / f".mode.{os.getpid()}"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for file in folder.rglob("*") if path == folder else (path,):
        if file.is_file() and not file.is_symlink():
            file.chmod(mode)


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk, so that a rename survives a power failure."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        return  # this run did not create the folder
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in FSYNC_UNSUPPORTED:  # some network file systems cannot fsync folders
            raise
    finally:
        os.close(descriptor)
