"""Read records from files, folders and Hub datasets, with the split syntax of the datasets library.

A `split` is a name, a part of a split such as train[:10%], or several splits joined by +.
"""

import errno
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from trainer.config import SourceSection, UserError
from trainer.config.errors import to_text
from trainer.config.files import describe_broken_link
from trainer.config.paths import find_similar_path, is_remote
from trainer.contract.known_versions import require
from trainer.contract.object_store import fetch_data
from trainer.data.built_folder import DISK_FULL
from trainer.data.formats import join_names
from trainer.data.source_files import READERS, describe_missing_split, describe_source, find_data_files
from trainer.data.text_files import LFS_POINTER, RAW_COLUMNS, get_data_suffix, is_lfs_pointer, read_raw_records

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


_PART = re.compile(r"^\s*([\w.-]+)\s*(\[.*\])?(\(\w+\))?\s*$")
_SPLIT_NAME = re.compile(r"\w[\w.-]*")
HUB_TIMEOUT_S = 4.0
_COUNTS = re.compile(r"^\[(\d*):(\d*)\]$")


def read_source(
    source: SourceSection, label: str, *, streaming: bool = False, scratch: Path | None = None
) -> "Dataset | IterableDataset":
    """Return at most `max_samples` rows of a source, in order; `parse_row` converts them to records.

    `label` is the setting's name in messages (dataset, dataset.mix.0, dataset.evaluation). With `streaming`, nothing is
    read until the result is iterated over; otherwise records are copied to `scratch`, by default the datasets library's
    cache. Raises UserError if the path is missing, cannot be read or has no records.
    """
    from datasets import Dataset

    local = resolve_local_path(source, label)

    def read(name: str) -> "Dataset | IterableDataset":
        if local is None:
            return _read_hub(source, name, label, streaming)
        if _is_saved_dataset(local):
            return _read_saved_dataset(source, local, name, label)
        return _read_files(source, local, name, label, streaming, scratch)

    records = read_split(source.split, label, read)
    if source.max_samples is not None:
        records = records.take(source.max_samples)
    if isinstance(records, Dataset) and len(records) == 0:
        raise build_no_records_error(source, label)
    for name, feature in (records.features or {}).items():
        if (undecoded := _disable_decoding(feature)) != feature:
            records = records.cast_column(name, undecoded)
    return records


def _disable_decoding(feature: Any) -> Any:
    from datasets import Image, List

    if isinstance(feature, Image):
        return Image(decode=False)
    if isinstance(feature, List):
        return List(_disable_decoding(feature.feature), feature.length)
    return {name: _disable_decoding(inner) for name, inner in feature.items()} if isinstance(feature, dict) else feature


def compute_content_key(source: SourceSection, label: str) -> str:
    """Return a hash of the source's bytes, so that the cache is never used for an edited file.

    For a Hub dataset, return the fingerprint of its cached copy. Raises UserError if the source cannot be read.
    """
    local = resolve_local_path(source, label)
    if local is None:
        records = read_split(source.split, label, lambda name: _read_hub(source, name, label, streaming=False))
        return str(require(records, "_fingerprint", "datasets"))
    if _is_saved_dataset(local):
        files = sorted(local.rglob("*.arrow"))
    else:
        names = parse_split_names(source.split, label)
        files = [file for name in names for file in find_data_files(source, local, name, label)]
    digest = xxhash.xxh3_128()
    for file in files:
        name = str(file.relative_to(local) if local.is_dir() else file.suffix)
        if re.search("[\ud800-\udfff]", name):  # how Python represents bytes that are not UTF-8
            raise UserError(f"{describe_source(source, label)}: the file name {name!a} is not UTF-8; rename it")
        digest.update(f"{name}:{file.stat().st_size}\n".encode())
        try:
            with file.open("rb") as stream:
                while chunk := stream.read(1 << 22):
                    digest.update(chunk)
        except OSError as error:
            raise UserError(
                f"{describe_source(source, label)}: {file.name} cannot be read ({error.strerror}); "
                "fix its permissions, or copy it"
            ) from None
    return digest.hexdigest()


def build_no_records_error(source: SourceSection, label: str) -> UserError:
    header = " (the first line of a CSV file names its columns)" * (".csv" in str(source.path).lower())
    return UserError(f"{describe_source(source, label)}: has no records{header}; use another dataset")


def resolve_local_path(source: SourceSection, label: str) -> Path | None:
    """Return a source's local path, downloading it if necessary; None for a Hub ID. Raises UserError if missing."""
    assert source.path is not None, f"{label}: a source without a path passed the configuration's checks"
    where = describe_source(source, label)
    if not source.path.strip():
        raise UserError(f"{where}: is empty; use a file, a folder or the Hub ID of a dataset")
    if is_remote(source.path):
        return fetch_data(source.path, where)
    if "://" in source.path:
        fix = "write it without file://" if source.path.startswith("file:") else "download it, or use a Hub dataset"
        raise UserError(f"{where}: this kind of URL is not supported; {fix}, or use a URL such as s3://bucket/data")
    path = Path(source.path).expanduser()
    try:
        mode = path.absolute().stat().st_mode
    except (OSError, ValueError) as error:  # missing, no permission, a long name, a symlink loop, a NUL byte
        if problem := describe_broken_link(path):
            raise UserError(f"{where}: {problem}; fix the path, or the link") from None
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            _check_missing_path(source, path, where)
            return None
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{where}: cannot be read ({reason}); fix the path, or its permissions") from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError(f"{where}: is a pipe, socket or device, but data is read more than once; write it to a file")
    return path.absolute()


def _check_missing_path(source: SourceSection, path: Path, where: str) -> None:
    """Raise UserError for a missing path, unless it may be a Hub ID."""
    assert source.path is not None
    has_file_name = source.path.count("/") > 1 or get_data_suffix(path) in READERS or "[" in source.path
    if not (source.path.startswith(("/", "~", ".")) or has_file_name):
        return
    near = find_similar_path(path)
    hint = f"did you mean {near}?" if near else "use a file, a folder or the Hub ID of a dataset"
    if any(mark in source.path for mark in ",*["):
        hint = "use a folder with patterns in dataset.data_files, or several sources in dataset.mix"
    raise UserError(f"{where}: no such file or folder (searched for {path.absolute()}); {hint}")


def _is_saved_dataset(path: Path) -> bool:
    try:
        return (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()
    except PermissionError:  # reported when its files are read
        return False


def _read_files(
    source: SourceSection, local: Path, split: str, label: str, streaming: bool, scratch: Path | None
) -> "Dataset | IterableDataset":
    from datasets import Dataset, Features, IterableDataset, Value

    datasets = _import_datasets()
    where, files = describe_source(source, label), find_data_files(source, local, split, label)
    names, kind = [str(file) for file in files], READERS[get_data_suffix(files[0])]
    if source.text_mode != "line" and kind != "text":
        raise UserError(
            f"{label}.text_mode={source.text_mode}: only for .txt and .md files, but {where} is {kind}; remove it"
        )
    if all(file.stat().st_size == 0 for file in files):
        raise build_no_records_error(source, label)
    cache = str(scratch) if scratch else None
    # The library would log bad files in addition to our error.
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        if kind == "parquet":
            _check_parquet_files(files, where)
            return datasets.load_dataset(kind, data_files=names, split="train", streaming=streaming, cache_dir=cache)
        arguments = {"files": names, "kind": kind, "where": where, "text_mode": source.text_mode}
        features = Features(dict.fromkeys(RAW_COLUMNS, Value("string")))
        if streaming:
            return IterableDataset.from_generator(read_raw_records, features=features, gen_kwargs=arguments)
        state = [(file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return Dataset.from_generator(
            read_raw_records, features=features, cache_dir=cache, gen_kwargs={"state": tuple(state), **arguments}
        )
    except _list_read_errors() as error:
        raise _build_read_error(source, label, kind, error) from None
    finally:
        datasets.logging.set_verbosity(verbosity)


def _check_parquet_files(files: list[Path], where: str) -> None:
    """Raise UserError if a file is not Parquet, or has a column that the first file lacks."""
    from pyarrow.parquet import read_schema

    names: list[list[str]] = []
    for file in files:
        try:
            names.append(read_schema(file).names)
        except (ValueError, OSError):
            problem = LFS_POINTER if is_lfs_pointer(file) else "is truncated or not Parquet; copy or rename it"
            raise UserError(f"{where}: {file.name} {problem}") from None
        if others := set(names[-1]) - set(names[0]):
            problem = f"has {join_names(sorted(others))}, but {files[0].name} has only {join_names(names[0])}"
            raise UserError(f"{where}: {file.name} {problem}; use the same columns in all files, or dataset.mix")


def _import_datasets() -> Any:
    """Import the datasets library on first use, because the import takes half a second."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def _list_read_errors() -> tuple[type[Exception], ...]:
    from datasets.exceptions import DatasetGenerationError

    # Raised by datasets and Arrow for files that are truncated or empty, or have another format or unsupported types.
    return (DatasetGenerationError, ValueError, OSError, EOFError, StopIteration, TypeError, NotImplementedError)


def read_rows(records: "Dataset | IterableDataset", source: SourceSection, label: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a source. Raises UserError if they cannot be read."""
    try:
        yield from records
    except _list_read_errors() as error:
        raise _build_read_error(source, label, "data", error) from None


def _build_read_error(source: SourceSection, label: str, kind: str, error: Exception) -> Exception:
    """Return the error to raise for unreadable files: a UserError, or OSError if the disk is full."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    for cause in causes:
        if isinstance(cause, UserError):
            return cause
        if isinstance(cause, OSError) and cause.errno in DISK_FULL:
            return cause
        if str(cause).startswith("Not enough disk space"):  # the library checks before it writes
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if isinstance(cause, OSError) and cause.filename and cause.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            return UserError(
                f"{describe_source(source, label)}: cannot be read, because {cause.filename} cannot be written "
                f"({cause.strerror}); fix its permissions, or set HF_DATASETS_CACHE to another folder"
            )
    reason = str(error.__cause__ or error)
    if isinstance(error, StopIteration) or re.search("corresponds to no data|BatchSize must be", f"{error} {reason}"):
        return build_no_records_error(source, label)
    problem = f"cannot be read as {kind} ({reason})"
    return UserError(f"{describe_source(source, label)}: {problem}; copy it again, or convert it to JSONL")


def _read_saved_dataset(source: SourceSection, local: Path, split: str, label: str) -> "Dataset":
    from datasets import Dataset

    try:
        loaded = _import_datasets().load_from_disk(str(local))
    except (ValueError, OSError, LookupError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{describe_source(source, label)}: cannot be read as a saved dataset ({reason}); save or copy it again"
        ) from None
    if isinstance(loaded, Dataset):
        if split not in ("train", str(loaded.split)):
            raise UserError(describe_missing_split(label, split, to_text(source.path)))
        return loaded
    if split not in loaded:
        raise UserError(f"{label}.split={split}: {source.path} has the splits {', '.join(loaded)}; use one of them")
    return loaded[split]


def _read_hub(source: SourceSection, split: str, label: str, streaming: bool) -> "Dataset | IterableDataset":
    """Read a dataset on the Hub, or its cached copy if the Hub cannot be reached."""
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    datasets = _import_datasets()
    where = describe_source(source, label)
    disable_retries_without_network(str(source.path))
    try:
        return datasets.load_dataset(
            source.path,
            source.name,
            data_files=list(source.data_files) or None,
            revision=source.revision,
            split=split,
            streaming=streaming,
        )
    except ConnectionError as error:
        offline = datasets.config.HF_HUB_OFFLINE
        reason = "HF_HUB_OFFLINE is set" if offline else f"the Hub cannot be reached ({type(error).__name__})"
        raise UserError(
            f"{where}: no such file or folder, no such Hub dataset in the cache, and {reason}; "
            "fix the path, or download the dataset on a machine with network access"
        ) from None
    except (DatasetNotFoundError, FileNotFoundError) as error:
        raise UserError(f"{where}: no such file, folder or Hub dataset ({error}); fix the path") from None
    except ValueError as error:
        settings = {"split": f"{label}.split={split}", "config": f"{label}.name={source.name}"}
        matching = (setting for word, setting in settings.items() if word in str(error).lower())
        raise UserError(f"{next(matching, where)}: {error}") from None
    except DatasetGenerationError as error:
        raise UserError(f"{where}: cannot be read ({error.__cause__ or error}); check its files") from None


def parse_split_names(split: str, label: str) -> list[str]:
    """Return the names in a split, such as `a` and `b` in a[:10]+b. Raises UserError if the split is malformed."""
    if _SPLIT_NAME.fullmatch(split):
        return [split]
    from datasets import ReadInstruction

    parts = [_PART.match(part) for part in split.split("+")]
    try:
        ReadInstruction.from_spec(split)
    except (ValueError, AssertionError):
        parts = [None]
    names = [part.group(1) for part in parts if part]
    if len(names) < len(parts):
        raise UserError(f"{label}.split={split}: not a split; use train, train[:1000], train[10%:20%] or a+b")
    return names


def read_split(
    split: str, label: str, read: "Callable[[str], Dataset | IterableDataset]"
) -> "Dataset | IterableDataset":
    """Return the records of a split. `read(name)` reads one split completely. Raises UserError for an empty part."""
    from datasets import concatenate_datasets

    names = parse_split_names(split, label)
    parts = [
        _select_part(read(name), name, spec.strip(), label) for name, spec in zip(names, split.split("+"), strict=True)
    ]
    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)


def _select_part(records: "Dataset | IterableDataset", name: str, spec: str, label: str) -> "Dataset | IterableDataset":
    from datasets import Dataset, ReadInstruction

    if spec == name:
        return records
    if isinstance(records, Dataset):
        try:
            (bounds,) = ReadInstruction.from_spec(spec).to_absolute({name: len(records)})
        except (ValueError, AssertionError) as error:
            raise UserError(f"{label}.split={spec}: {error}") from None
        if bounds.from_ >= bounds.to:
            raise UserError(f"{label}.split={spec}: selects none of the {len(records):,} records; use a larger slice")
        return records.select(range(bounds.from_, bounds.to))
    counts = _COUNTS.match(spec.removeprefix(name))
    if counts is None:
        fix = f"use counts such as {name}[:1000], or set dataset.streaming: false"
        raise UserError(f"{label}.split={spec}: the length of a stream is not known in advance; {fix}")
    first = int(counts.group(1) or 0)
    records = records.skip(first) if first else records
    return records.take(max(0, int(counts.group(2)) - first)) if counts.group(2) else records


def disable_retries_without_network(name: str) -> None:
    """Disable retries if the Hub cannot be reached. Call this before looking up `name` on the Hub.

    huggingface_hub would try each file six times within 23 s, even if it is cached.
    """
    if not Path(name).exists():
        _disable_retries_without_network()


@cache
def _disable_retries_without_network() -> None:
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import http_backoff

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except (HTTPError, OSError):
        defaults = http_backoff.__kwdefaults__
        assert "max_retries" in defaults, f"http_backoff of huggingface_hub takes {sorted(defaults)}, not max_retries"
        defaults["max_retries"] = 0
