"""Files on object stores (s3://, gs://, hf:// and others, by fsspec), each with a copy on this machine.

A run with such an `output_dir` works in the copy. `fetch_run` brings what the store has before a run or a command reads
it, and `upload_run` makes the store equal to the copy. COMPLETE, which lists the checksums of a checkpoint, is uploaded
last and deleted first: a checkpoint whose upload or deletion was interrupted is one without it, or with a wrong
checksum, and resuming skips it as on a disk.
"""

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.config import UserError
from trainer.config.files import find_json
from trainer.config.paths import is_remote, local_copy, remote_place

LAST = "COMPLETE"
CHECKPOINT = re.compile(r"checkpoint-\d+")
_NOT_UPLOADED = re.compile(r"\.|logs$|lock|abandoned")
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
TAGS = ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "mtime", "created")
"""What file systems give as a file's version."""


@contextmanager
def store(url: str) -> Iterator[tuple[Any, str]]:
    """Yield the file system of a URL, and the path in it; every error is a UserError that names the URL."""
    import fsspec
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0]
    try:
        yield url_to_fs(url, use_listings_cache=False) if scheme != "hf" else url_to_fs(url)
    except UserError:
        raise
    except ImportError:
        package = PACKAGES.get(scheme, f"the package of fsspec for {scheme}")
        raise UserError(f"{url}: needs {package}, which is not installed; pip install {package}") from None
    except Exception as error:  # each store has its own
        known = ", ".join(sorted({"hf", "s3", "gs", "abfs"} & {*fsspec.available_protocols()}))
        fix = f"use one of {known}" if scheme not in fsspec.available_protocols() else "check name and credentials"
        raise UserError(f"{url}: cannot be used ({type(error).__name__}: {error}); {fix}") from None


def fetch_data(url: str, named: str) -> Path:
    """Return the copy of a file or folder after bringing what has changed. Raises UserError if nothing is there."""
    target = local_copy(url)
    record = target.with_name(f".{target.name}.versions")
    with store(url) as (system, root):
        found = {path: _version(entry) for path, entry in system.find(root, detail=True).items()}
        if not found:
            raise UserError(f"{named}: no such file or folder; check its name")
        known = find_json(record, dict[str, str], {})
        for path, version in found.items():
            if known.get(path) != version or not _place(target, root, path).exists():
                _download(system, path, _place(target, root, path))
    for gone in known.keys() - found.keys():
        _place(target, root, gone).unlink(missing_ok=True)
    record.write_text(json.dumps(found), encoding="utf-8")
    return target


def _version(entry: dict[str, Any]) -> str:
    return f"{entry.get('size')} {next((entry[tag] for tag in TAGS if entry.get(tag)), '')}"


def _place(target: Path, root: str, path: str) -> Path:
    """Return the place of a stored file in the copy; the names in a store cannot lead out of it."""
    inner = path.removeprefix(root).strip("/")
    return target.joinpath(*(part for part in inner.split("/") if part not in ("", ".", "..")))


def _download(system: Any, path: str, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    partly = place.with_name(f".{place.name}.{os.getpid()}")
    system.get_file(path, str(partly))
    os.replace(partly, place)


def open_run(text: str) -> Path:
    """Return the folder of a run or checkpoint that a command names, after fetching it if it is on a store."""
    if not is_remote(text):
        return Path(text)
    folder = local_copy(text)
    fetch_run(folder.parent if CHECKPOINT.fullmatch(folder.name) else folder)
    return folder


def fetch_run(run_dir: Path) -> None:
    """Bring the checkpoints that the copy lacks, and the other files of the run if these are newer there."""
    url = remote_place(run_dir)
    if url is None:
        return
    with store(url) as (system, root):
        inner = {path.removeprefix(root).strip("/"): path for path in system.find(root)}
        remote = {name.partition("/")[0] for name in inner if name.endswith(f"/{LAST}")} & _checkpoints([*inner])
        local = {path.parent.name for path in run_dir.glob(f"checkpoint-*/{LAST}")}
        is_newer = _newest(remote) > _newest(local) or not (run_dir / "run.json").exists()
        for name in sorted(inner, key=lambda name: name.endswith(LAST)):
            folder = name.partition("/")[0]
            if folder in remote - local or (is_newer and not CHECKPOINT.fullmatch(folder)):
                _download(system, inner[name], _place(run_dir, "", name))


def upload_run(run_dir: Path, *, is_first: bool) -> str | None:
    """Make the store equal to the copy, and return its URL; None if the folder is no copy.

    `is_first`: checkpoints that only the store has are of an earlier run, and are kept there under another name.
    """
    url = remote_place(run_dir)
    if url is None:
        return None
    with store(url) as (system, root):
        stored = {path.removeprefix(root).strip("/") for path in system.find(root)}
        ours = {path.parent.name for path in run_dir.glob(f"checkpoint-*/{LAST}")}
        for name in _checkpoints([*stored]) - ours:
            if is_first:
                system.mv(f"{root}/{name}", f"{root}/abandoned-{int(time.time())}-{name}", recursive=True)
            else:
                if f"{name}/{LAST}" in stored:
                    system.rm_file(f"{root}/{name}/{LAST}")
                system.rm(f"{root}/{name}", recursive=True)
        for path in sorted(run_dir.rglob("*"), key=lambda path: (path.name == LAST, path)):
            name = path.relative_to(run_dir).as_posix()
            folder = name.partition("/")[0]
            is_done = folder in ours and f"{folder}/{LAST}" in stored
            wanted = folder in ours if CHECKPOINT.fullmatch(folder) else not _NOT_UPLOADED.match(folder)
            if wanted and not is_done and path.is_file():
                system.put_file(str(path), f"{root}/{name}")
    return url


def _checkpoints(names: list[str]) -> set[str]:
    return {folder for name in names if CHECKPOINT.fullmatch(folder := name.partition("/")[0])}


def _newest(names: set[str]) -> int:
    return max((int(name.rpartition("-")[2]) for name in names), default=-1)
