"""Copy files to and from object stores (s3://, gs://, hf:// and others, through fsspec).

A run with such an `output_dir` works in a local copy: `fetch_run` downloads checkpoints that the copy lacks, and
`upload_run` uploads files that the store lacks. COMPLETE, which contains a checkpoint's checksums, is copied last and
deleted first, so that a resumed run skips a partially uploaded checkpoint, as on a local disk.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.config import UserError
from trainer.config.files import read_json_or_default
from trainer.config.paths import get_local_path, get_remote_url, is_remote

COMPLETE_MARKER = "COMPLETE"
CHECKPOINT = re.compile(r"checkpoint-\d+")
_LOCAL_ONLY = re.compile(r"\.|logs$|lock|abandoned")
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
VERSION_KEYS = ("size", "ETag", "etag", "md5Hash", "blob_id", "LastModified", "mtime", "created")


@contextmanager
def open_store(url: str, label: str = "") -> Iterator[tuple[Any, str]]:
    """Yield the file system and path for a URL. Convert errors to UserErrors prefixed with `label` or the URL."""
    import fsspec
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0]
    try:
        yield url_to_fs(url, use_listings_cache=False) if scheme != "hf" else url_to_fs(url)
    except UserError:
        raise
    except ImportError:
        package = PACKAGES.get(scheme, f"fsspec's package for {scheme}")
        raise UserError(f"{label or url}: needs {package}, which is not installed; pip install {package}") from None
    except Exception as error:  # each store raises its own exception types
        fix = "check name and credentials" if scheme in fsspec.available_protocols() else "use one of s3, gs, abfs, hf"
        fix = "install Hadoop's client, or use one of s3, gs, abfs, hf" if "libjvm" in str(error) else fix
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise UserError(f"{label or url}: cannot be accessed ({reason}); {fix}") from None


def _is_complete_marker(name: str) -> bool:
    return name.endswith(COMPLETE_MARKER)


def _list_files(filesystem: Any, root: str) -> dict[str, Any]:
    """Return the entries below `root` by relative path ("" if `root` is a file), except paths outside `root`."""
    entries = {path.removeprefix(root).strip("/"): entry for path, entry in filesystem.find(root, detail=True).items()}
    return {name: entry for name, entry in entries.items() if ".." not in name.split("/")}


def _download(filesystem: Any, root: str, names: Iterable[str], target: Path) -> None:
    for name in sorted(names, key=_is_complete_marker):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        filesystem.get_file(f"{root}/{name}" if name else root, str(target / name))


def fetch_data(url: str, label: str) -> Path:
    """Return a local copy of a file or folder, downloaded again if it changed. Raises UserError if it is missing."""
    target = get_local_path(url)
    record = target.with_name(f".{target.name}.versions")
    with open_store(url, label) as (system, root):
        files = _list_files(system, root)
        if not files:
            raise UserError(f"{label}: no such file or folder; check its name")
        versions = {name: str([entry.get(key) for key in VERSION_KEYS]) for name, entry in files.items()}
        known = read_json_or_default(record, dict[str, str], {})
        if versions != known or not target.exists():
            record.unlink(missing_ok=True)
            _download(system, root, files, target)
            for removed in known.keys() - files.keys():
                (target / removed).unlink(missing_ok=True)
            record.write_text(json.dumps(versions), encoding="utf-8")
    return target


def open_run(location: str) -> Path:
    """Return the local folder of a run or checkpoint, fetching it first if it is in an object store."""
    if not is_remote(location):
        return Path(location)
    folder = get_local_path(location)
    fetch_run(folder.parent if CHECKPOINT.fullmatch(folder.name) else folder)
    return folder


def _index_files(names: Iterable[str]) -> tuple[dict[str, str], set[str]]:
    """Return the top-level folder of each file, and the names of the complete checkpoints."""
    tops = {name: name.partition("/")[0] for name in names}
    return tops, {top for name, top in tops.items() if CHECKPOINT.fullmatch(top) and name == f"{top}/{COMPLETE_MARKER}"}


def _list_local_files(run_dir: Path) -> list[str]:
    return [path.relative_to(run_dir).as_posix() for path in run_dir.rglob("*") if path.is_file()]


def _find_newest_step(checkpoints: set[str]) -> int:
    return max((int(name.rpartition("-")[2]) for name in checkpoints), default=-1)


def fetch_run(run_dir: Path) -> None:
    """Download checkpoints that the local copy lacks, and other files if the store has a newer checkpoint."""
    if (url := get_remote_url(run_dir)) is None:
        return
    with open_store(url, f"output_dir={url}") as (system, root):
        remote, stored = _index_files(_list_files(system, root))
        _, copied = _index_files(_list_local_files(run_dir))
        is_newer = _find_newest_step(stored) > _find_newest_step(copied) or not (run_dir / "run.json").exists()
        missing = stored - copied
        names = (name for name, top in remote.items() if top in missing or (is_newer and not CHECKPOINT.match(top)))
        _download(system, root, names, run_dir)


def upload_run(run_dir: Path) -> str | None:
    """Upload new checkpoints and results from a run's local copy. Return its URL, or None if `run_dir` is not a copy.

    Deletes stored checkpoints that are missing locally: this run downloaded them, then moved or deleted its copies.
    """
    if (url := get_remote_url(run_dir)) is None:
        return None
    with open_store(url) as (system, root):
        remote, stored = _index_files(_list_files(system, root))
        local, copied = _index_files(_list_local_files(run_dir))
        for name in sorted(remote, key=_is_complete_marker, reverse=True):
            if CHECKPOINT.fullmatch(remote[name]) and remote[name] not in copied:
                system.rm_file(f"{root}/{name}")
        for name in sorted(local, key=_is_complete_marker):
            top = local[name]
            if top in copied - stored or not (CHECKPOINT.match(top) or _LOCAL_ONLY.match(top)):
                system.put_file(str(run_dir / name), f"{root}/{name}")
    return url
