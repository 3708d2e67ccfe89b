"""Folders that one of several processes builds and all read; damaged ones are rebuilt."""

import errno
import hashlib
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import xxhash
from filelock import FileLock

from trainer.config import UserError

Loaded = TypeVar("Loaded")
MANIFEST = "files.json"
# Only the size of larger files is compared: reading them would take minutes on every rank.
CHECKED_BYTES = 1 << 30
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
UNWRITABLE = FULL | {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG}
# Exceptions seen when reading half a file, or one with changed bytes (Arrow's own are ValueErrors).
DAMAGE = (OSError, ValueError, LookupError, TypeError, EOFError, RecursionError, zipfile.BadZipFile, zlib.error)


def load_or_build(
    folder: Path, build: Callable[[Path], None], load: Callable[[Path], Loaded]
) -> tuple[Loaded, str | None]:
    """Return `load(folder)`, after `build` has filled the folder if necessary, and a note if it was damaged.

    One process builds, behind a lock that is released if it dies, and renames the complete folder into place. A folder
    that differs from its manifest, or cannot be loaded, is rebuilt. Raises UserError if the folder cannot be written
    or read by this user.
    """
    try:
        loaded, _ = _try_load(folder, load)
        if loaded is not None:
            return loaded, None
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            return _build_locked(folder, build, load)
    except OSError as error:
        above = bool(error.filename) and Path(error.filename) in folder.parents  # as below /proc
        if error.errno not in UNWRITABLE and not above:
            raise
        raise _unwritable(folder.parent, error) from error


def _try_load(folder: Path, load: Callable[[Path], Loaded]) -> tuple[Loaded | None, Exception | None]:
    """Return `load(folder)`, or None and why, if the folder is damaged."""
    if not folder.exists():
        return None, None
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name, written in manifest.items():
            path = folder / name
            if written != [path.stat().st_size, _digest(path)]:
                raise ValueError(f"{name} is not what was written")
        return load(folder), None
    except PermissionError:
        raise
    except DAMAGE as error:
        return None, error


def _build_locked(
    folder: Path, build: Callable[[Path], None], load: Callable[[Path], Loaded]
) -> tuple[Loaded, str | None]:
    loaded, damage = _try_load(folder, load)
    if loaded is not None:  # built by another process in the meantime
        return loaded, None
    if damage is not None:
        shutil.rmtree(folder)
    building = folder.with_suffix(".building")
    shutil.rmtree(building, ignore_errors=True)  # left by a process that died, since nobody else has the lock
    building.mkdir()
    try:
        build(building)
        # Network file systems keep files that were removed while open as hidden files, and so their folder.
        built = sorted(path for path in building.glob("[!.]*") if path.is_file())
        files = {path.name: [path.stat().st_size, _digest(path)] for path in built}
        (building / MANIFEST).write_text(json.dumps(files), encoding="utf-8")
        os.rename(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    note = f"the tokenised data in {folder} was damaged ({' '.join(str(damage).split())}) and is made again"
    return load(folder), note if damage else None


def _digest(path: Path) -> str:
    if path.stat().st_size > CHECKED_BYTES:
        return ""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_64).hexdigest()


def _unwritable(folder: Path, error: OSError) -> UserError:
    where = f"dataset.cache_dir={folder}: tokenised data cannot be written there ({error.strerror}"
    entry = Path(error.filename or folder)
    if error.errno in (errno.EACCES, errno.EPERM) and entry not in (folder, *folder.parents):
        return UserError(
            f"dataset.cache_dir={folder}: {entry.relative_to(folder)} in it is another user's ({error.strerror}); let "
            f"its owner run `chmod -R a+rX {folder}`, or use another folder"
        )
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return UserError(f"{where}); use a folder, not a file")
    advice = "make room there" if error.errno in FULL else "fix its permissions"
    return UserError(f"{where}); {advice}, or use another folder")
