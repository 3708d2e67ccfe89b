"""Build a folder in one of several processes and load it in all of them; rebuild damaged folders."""

import errno
import hashlib
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from filelock import FileLock

from trainer.config import UserError
from trainer.config.files import describe_broken_link

Loaded = TypeVar("Loaded")
MANIFEST = "files.json"
# For larger files, only the size is compared: reading them would take minutes on every rank.
MAX_DIGEST_BYTES = 1 << 30
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
WRITE_ERRORS = DISK_FULL | {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG}
# Exceptions seen when reading a truncated or changed file (Arrow's own exceptions are ValueErrors).
READ_ERRORS = (OSError, ValueError, LookupError, TypeError, EOFError, RecursionError, zipfile.BadZipFile, zlib.error)


def load_or_build(
    folder: Path, build: Callable[[Path], None], load: Callable[[Path], Loaded]
) -> tuple[Loaded, str | None]:
    """Return `load(folder)`, calling `build` first if necessary, and a note if the folder was damaged.

    One process builds the folder under a lock, which is released if the process dies, and then renames it into place. A
    folder that differs from its manifest, or cannot be loaded, is rebuilt. Raises UserError if this user cannot write
    or read the folder.
    """
    try:
        loaded, _ = _try_load(folder, load)
        if loaded is not None:
            return loaded, None
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            return _build_locked(folder, build, load)
    except OSError as error:
        in_parent = bool(error.filename) and Path(error.filename) in folder.parents  # for example below /proc
        if error.errno not in WRITE_ERRORS and not in_parent:
            raise
        raise _build_unwritable_error(folder.parent, error) from error


def _try_load(folder: Path, load: Callable[[Path], Loaded]) -> tuple[Loaded | None, Exception | None]:
    """Return (`load(folder)`, None), or (None, error) if the folder is damaged, or (None, None) if it is missing."""
    if not folder.exists():
        return None, None
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name, entry in manifest.items():
            if entry != _describe_file(folder / name):
                raise ValueError(f"{name} differs from the manifest")
        return load(folder), None
    except PermissionError:
        raise
    except READ_ERRORS as error:
        return None, error


def _build_locked(
    folder: Path, build: Callable[[Path], None], load: Callable[[Path], Loaded]
) -> tuple[Loaded, str | None]:
    loaded, damage = _try_load(folder, load)
    if loaded is not None:  # another process has built it
        return loaded, None
    if damage is not None:
        shutil.rmtree(folder)
    building = folder.with_suffix(".building")
    shutil.rmtree(building, ignore_errors=True)  # left by a process that died, since this one holds the lock
    building.mkdir()
    try:
        build(building)
        # Network file systems keep deleted files under a hidden name while they are open.
        files = sorted(path for path in building.glob("[!.]*") if path.is_file())
        manifest = {path.name: _describe_file(path) for path in files}
        (building / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        os.rename(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    note = f"the cached data in {folder} was damaged ({' '.join(str(damage).split())}) and has been rebuilt"
    return load(folder), note if damage else None


def _describe_file(path: Path) -> list[int | str]:
    """Return a file's entry in the manifest: its size and, unless it is large, its digest."""
    size = path.stat().st_size
    if size > MAX_DIGEST_BYTES:
        return [size, ""]
    with path.open("rb") as stream:
        return [size, hashlib.file_digest(stream, xxhash.xxh3_64).hexdigest()]


def digest_json(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def _build_unwritable_error(folder: Path, error: OSError) -> UserError:
    entry = Path(error.filename or folder)
    if error.errno in (errno.EACCES, errno.EPERM) and entry not in (folder, *folder.parents):
        return UserError(
            f"dataset.cache_dir={folder}: {entry.relative_to(folder)} in this folder belongs to another user "
            f"({error.strerror}); ask its owner to run `chmod -R a+rX {folder}`, or use another folder"
        )
    if problem := describe_broken_link(folder):
        return UserError(f"dataset.cache_dir={folder}: {problem}; fix the link, or use another folder")
    problem = f"dataset.cache_dir={folder}: cannot be written ({error.strerror})"
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return UserError(f"{problem}; use a folder, not a file")
    fix = "free some space" if error.errno in DISK_FULL else "fix its permissions"
    return UserError(f"{problem}; {fix}, or use another folder")
