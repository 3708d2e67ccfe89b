"""Write small files atomically: to a temporary file in the same folder, synced, and renamed into place.

A process that is killed, or a host that loses power, leaves the file as it was before. Here, and not in a package of
the trainer, because the launcher writes such files as well.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Replace the content of `path` by `text`; readers see the old content or the new one, never a part.

    A link stays a link, and an existing file keeps its permissions.
    """
    path = Path(os.path.realpath(path))
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            if path.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, content: Any) -> None:
    """`write_whole` of JSON. Raises ValueError for NaN and infinity, at which other readers would stop."""
    write_whole(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def apply_umask(path: Path) -> None:
    """Give a file, or every file below a folder, the mode of new files: safetensors and mkdtemp deny it to others."""
    folder = path if path.is_dir() else path.parent
    probe = folder / f".mode.{os.getpid()}"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for each in folder.rglob("*") if path == folder else (path,):
        if each.is_file() and not each.is_symlink():
            each.chmod(mode)


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to the disk: without it a rename may be forgotten when the power fails."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
