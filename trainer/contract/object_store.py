"""Files on object stores (s3://, gs://, hf:// and others, by fsspec), each with a copy on this machine.

A run with such an `output_dir` works in the copy: `fetch_run` brings what the store has, `upload_run` makes the store
equal to the copy. COMPLETE, which has the checksums of a checkpoint, is copied last and deleted first, so that resuming
skips a checkpoint with an interrupted upload, as on a disk.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.config import UserError
from trainer.config.files import find_json
from trainer.config.paths import is_remote, local_copy, remote_url

LAST = "COMPLETE"
CHECKPOINT = re.compile(r"checkpoint-\d+")
_ONLY_HERE = re.compile(r"\.|logs$|lock|abandoned")
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
VERSION = ("size", "ETag", "etag", "md5Hash", "blob_id", "LastModified", "mtime", "created")


@contextmanager
def store(url: str, named: str = "") -> Iterator[tuple[Any, str]]:
    """Yield the file system of a URL, and the path in it; every error is a UserError with `named` or the URL."""
    import fsspec
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0]
    try:
        yield url_to_fs(url, use_listings_cache=False) if scheme != "hf" else url_to_fs(url)
    except UserError:
        raise
    except ImportError:
        package = PACKAGES.get(scheme, f"fsspec's package for {scheme}")
        raise UserError(f"{named or url}: needs {package}, which is not installed; pip install {package}") from None
    except Exception as error:  # each store has its own
        fix = "check name and credentials" if scheme in fsspec.available_protocols() else "use one of s3, gs, abfs, hf"
        fix = "install Hadoop's client, or use one of s3, gs, abfs, hf" if "libjvm" in str(error) else fix
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise UserError(f"{named or url}: cannot be used ({reason}); {fix}") from None


def _is_not_last(name: str) -> bool:
    return not name.endswith(LAST)


def _list(system: Any, root: str) -> dict[str, Any]:
    """Return the entries of files by name below `root`, empty for a file; names that lead elsewhere are left out."""
    found = {path.removeprefix(root).strip("/"): entry for path, entry in system.find(root, detail=True).items()}
    return {name: entry for name, entry in found.items() if ".." not in name.split("/")}


def _get(system: Any, root: str, names: Iterable[str], target: Path) -> None:
    for name in sorted(names, key=_is_not_last, reverse=True):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        system.get_file(f"{root}/{name}" if name else root, str(target / name))


def fetch_data(url: str, named: str) -> Path:
    """Return the copy of a file or folder, downloaded again if anything changed; raises UserError if it is missing."""
    target = local_copy(url)
    record = target.with_name(f".{target.name}.versions")
    with store(url, named) as (system, root):
        files = _list(system, root)
        if not files:
            raise UserError(f"{named}: no such file or folder; check its name")
        versions = {name: str([entry.get(key) for key in VERSION]) for name, entry in files.items()}
        known = find_json(record, dict[str, str], {})
        if versions != known or not target.exists():
            record.unlink(missing_ok=True)
            _get(system, root, files, target)
            for gone in known.keys() - files.keys():
                (target / gone).unlink(missing_ok=True)
            record.write_text(json.dumps(versions), encoding="utf-8")
    return target


def open_run(text: str) -> Path:
    """Return the folder of a run or checkpoint that a command names, after fetching it if it is on a store."""
    if not is_remote(text):
        return Path(text)
    folder = local_copy(text)
    fetch_run(folder.parent if CHECKPOINT.fullmatch(folder.name) else folder)
    return folder


def _split(names: Iterable[str]) -> tuple[dict[str, str], set[str]]:
    """Return the first folder of each name, and the checkpoints that are complete."""
    folders = {name: name.partition("/")[0] for name in names}
    return folders, {at for name, at in folders.items() if CHECKPOINT.fullmatch(at) and name == f"{at}/{LAST}"}


def _names_here(run_dir: Path) -> list[str]:
    return [path.relative_to(run_dir).as_posix() for path in run_dir.rglob("*") if path.is_file()]


def _newest(checkpoints: set[str]) -> int:
    return max((int(name.rpartition("-")[2]) for name in checkpoints), default=-1)


def fetch_run(run_dir: Path) -> None:
    """Bring the checkpoints that the copy of a run lacks, and its other files if the store has a newer checkpoint."""
    if (url := remote_url(run_dir)) is None:
        return
    with store(url, f"output_dir={url}") as (system, root):
        (there, stored), (_, ours) = _split(_list(system, root)), _split(_names_here(run_dir))
        is_newer = _newest(stored) > _newest(ours) or not (run_dir / "run.json").exists()
        wanted = stored - ours
        names = (name for name, at in there.items() if at in wanted or (is_newer and not CHECKPOINT.match(at)))
        _get(system, root, names, run_dir)


def upload_run(run_dir: Path) -> str | None:
    """Make the store equal to the copy, and return its URL; None if the folder is no copy.

    Checkpoints that only the store has are deleted: `fetch_run` brought them before this run kept, moved or deleted
    them here.
    """
    if (url := remote_url(run_dir)) is None:
        return None
    with store(url) as (system, root):
        (there, stored), (here, ours) = _split(_list(system, root)), _split(_names_here(run_dir))
        for name in sorted(there, key=_is_not_last):
            if CHECKPOINT.fullmatch(there[name]) and there[name] not in ours:
                system.rm_file(f"{root}/{name}")
        for name in sorted(here, key=_is_not_last, reverse=True):
            if here[name] in ours - stored or not (CHECKPOINT.match(here[name]) or _ONLY_HERE.match(here[name])):
                system.put_file(str(run_dir / name), f"{root}/{name}")
    return url
