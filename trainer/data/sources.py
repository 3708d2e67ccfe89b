"""Where records come from: files, folders and hub names, read by the datasets library into one table per source."""

import gzip
import json
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any

import datasets
import xxhash
from datasets import Dataset, IterableDataset
from datasets.exceptions import DatasetGenerationError

from trainer.config import SourceSection, UserError
from trainer.config.known_versions import require
from trainer.data.formats import kind_of

READERS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".md": "text",
}
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval"),
    "test": ("test", "testing"),
}


def read_source(source: SourceSection, label: str, *, streaming: bool = False) -> Dataset | IterableDataset:
    """The records of one source in their own order, at most `max_samples` of them.

    `label` is the setting's name (dataset, dataset.mix.0, dataset.evaluation), for messages. With `streaming` nothing
    is read until the result is iterated over. Raises UserError if the path does not exist, cannot be read or is empty.
    """
    local = _local_path(source, label)
    if local is None:
        records = _read_hub(source, label, streaming)
    elif _is_saved_dataset(local):
        records = _read_saved(source, local, label)
    else:
        records = _read_files(source, _files_of(source, local, label), label, streaming)
    if source.max_samples is not None:
        records = records.take(source.max_samples)
    if isinstance(records, Dataset) and len(records) == 0:
        raise _empty(source, label)
    return records


def content_key(source: SourceSection, label: str) -> str:
    """A hash of the source's bytes, so that an edited file is never served from the cache.

    A hub data set is keyed by the fingerprint of its cached copy. Raises UserError as `read_source` does.
    """
    local = _local_path(source, label)
    if local is None:
        return str(require(_read_hub(source, label, streaming=False), "_fingerprint", "datasets"))
    digest = xxhash.xxh3_128()
    files = sorted(local.rglob("*.arrow")) if _is_saved_dataset(local) else _files_of(source, local, label)
    for file in files:
        digest.update(f"{file.relative_to(local) if local.is_dir() else file.suffix}:{file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()


def where_from(source: SourceSection, label: str) -> str:
    """The source as users wrote it, to begin a message with."""
    return f"{label}.path={source.path}"


def _empty(source: SourceSection, label: str) -> UserError:
    return UserError(f"{where_from(source, label)}: no records in it; give a data set that has some")


def _local_path(source: SourceSection, label: str) -> Path | None:
    """The path on this machine, or None for a hub name; a path that looks local but is not there is an error."""
    assert source.path is not None, f"{label}: a source without a path passed the configuration's checks"
    path = Path(source.path).expanduser()
    if path.exists():
        return path.absolute()
    looks_local = source.path.startswith(("/", "~", ".")) or source.path.count("/") > 1 or _suffix(path) in READERS
    if not looks_local:
        return None
    beside = path.parent
    while not beside.is_dir():
        beside = beside.parent
    near = (
        get_close_matches(path.name, [entry.name for entry in beside.iterdir()], n=1) if beside == path.parent else []
    )
    hint = f"did you mean {path.parent / near[0]}?" if near else "give a file, a folder or the name of a hub data set"
    raise UserError(f"{where_from(source, label)}: no such file or folder (looked for {path.absolute()}); {hint}")


def _suffix(path: Path) -> str:
    """The file's kind; .gz around it does not count, since datasets unpacks that."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def _is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()


def _files_of(source: SourceSection, local: Path, label: str) -> list[Path]:
    """The data files of a path: itself, or those in the folder that belong to the split."""
    where = where_from(source, label)
    kinds = ", ".join(READERS)
    if local.is_file():
        if _suffix(local) not in READERS:
            raise UserError(
                f"{where}: {local.suffix or 'a file without an ending'} is not understood; known are {kinds}"
            )
        return [local]
    files = [file for file in sorted(local.rglob("*")) if file.is_file() and _suffix(file) in READERS]
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(local).parts)]
    # A README beside the data is not data.
    files = [file for file in files if _suffix(file) != ".md"] or files
    if not files:
        raise UserError(f"{where}: no data files in this folder; looked for {kinds}")
    by_split = {file: _split_of(file.relative_to(local)) for file in files}
    splits = {split for split in by_split.values() if split}
    if splits:
        wanted = next((name for name, words in SPLIT_WORDS.items() if source.split in words), source.split)
        files = [file for file in files if by_split[file] == wanted]
        if not files:
            raise UserError(f"{label}.split={source.split}: {source.path} has the splits {', '.join(sorted(splits))}")
    readers = sorted({READERS[_suffix(file)] for file in files})
    if len(readers) > 1:
        raise UserError(f"{where}: files of several kinds ({', '.join(readers)}); name one file, or use dataset.mix")
    return files


def _split_of(path: Path) -> str | None:
    """The split a file belongs to by its name or folder: train-00000-of-00002.parquet, validation/part.jsonl."""
    parts = [part.lower() for part in (*path.parts[:-1], path.name.split(".")[0])]
    for part in reversed(parts):
        words = part.replace("_", "-").replace(" ", "-").split("-")
        for split, names in SPLIT_WORDS.items():
            if words[0] in names or words[-1] in names:
                return split
    return None


def _read_files(source: SourceSection, files: list[Path], label: str, streaming: bool) -> Dataset | IterableDataset:
    reader = READERS[_suffix(files[0])]
    options: dict[str, Any] = {"parse_agent_traces": False} if reader == "json" else {}
    if _suffix(files[0]) == ".tsv":
        options["sep"] = "\t"
    if all(file.stat().st_size == 0 for file in files):
        raise _empty(source, label)
    # The library logs its own account of a bad file; ours is the line that the user gets.
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        names = [str(file) for file in files]
        return datasets.load_dataset(reader, data_files=names, split="train", streaming=streaming, **options)
    except (DatasetGenerationError, ValueError, StopIteration, OSError) as error:
        raise _unreadable(source, files, label, error) from None
    finally:
        datasets.logging.set_verbosity(verbosity)


def rows_of(records: Dataset | IterableDataset, source: SourceSection, label: str) -> Iterator[dict[str, Any]]:
    """The records one after the other; a stream says only now what cannot be read, as a UserError."""
    rows = iter(records)
    while True:
        try:
            row = next(rows, None)
        except (DatasetGenerationError, ValueError, OSError) as error:
            local = _local_path(source, label)
            raise _unreadable(source, _files_of(source, local, label) if local else [], label, error) from None
        if row is None:
            return
        yield row


def _unreadable(source: SourceSection, files: list[Path], label: str, error: Exception) -> UserError:
    """What is wrong with files that the datasets library refused, with the line where that can be known."""
    for file in files:
        if READERS[_suffix(file)] == "json" and (problem := _first_bad_json(file)):
            return UserError(f"{where_from(source, label)}: {problem}")
    cause = error.__cause__ or error
    if isinstance(error, StopIteration) or "corresponds to no data" in str(error):
        return _empty(source, label)
    kind = f" as {READERS[_suffix(files[0])]}" if files else ""
    return UserError(f"{where_from(source, label)}: cannot be read{kind} ({cause})")


def _first_bad_json(file: Path) -> str | None:
    """The first line of a JSON or JSON Lines file that is not what it should be, or None if all are."""
    number = 0
    try:
        with _open_text(file) as stream:
            if stream.read(64).lstrip("\ufeff \t\r\n").startswith("["):  # one list, over any number of lines
                stream.seek(0)
                json.loads(stream.read().lstrip("\ufeff"))
                return None
            stream.seek(0)
            for number, line in enumerate(stream, start=1):
                if not line.strip("\ufeff \t\r\n"):
                    continue
                record = json.loads(line.lstrip("\ufeff"))
                if not isinstance(record, dict):
                    return f'line {number} of {file.name} holds {kind_of(record)}, not a record {{"field": ...}}'
    except json.JSONDecodeError as error:
        at = number or error.lineno
        return f"line {at} of {file.name} is not JSON ({error.msg}, column {error.colno}); mend or remove it"
    except UnicodeDecodeError as error:
        return f"{file.name} is not UTF-8 text (byte {error.start}); convert it"
    return None


def _open_text(file: Path) -> IO[str]:
    return gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8")


def _read_saved(source: SourceSection, local: Path, label: str) -> Dataset:
    """A folder that `save_to_disk` of the datasets library wrote."""
    try:
        loaded = datasets.load_from_disk(str(local))
    except (ValueError, OSError) as error:
        raise UserError(f"{where_from(source, label)}: cannot be read as a saved data set ({error})") from None
    if isinstance(loaded, Dataset):
        return loaded
    if source.split not in loaded:
        raise UserError(f"{label}.split={source.split}: {source.path} has the splits {', '.join(loaded)}")
    return loaded[source.split]


def _read_hub(source: SourceSection, label: str, streaming: bool) -> Dataset | IterableDataset:
    """A data set on the hub, or its cached copy where the hub cannot be reached."""
    where = where_from(source, label)
    try:
        return datasets.load_dataset(source.path, source.name, split=source.split, streaming=streaming)
    except ConnectionError as error:
        offline = datasets.config.HF_HUB_OFFLINE
        reason = "HF_HUB_OFFLINE is set" if offline else f"the hub cannot be reached ({type(error).__name__})"
        raise UserError(
            f"{where}: no file or folder of that name here, no hub data set of that name in the cache, and {reason}; "
            "mend the path, or fetch the data set where there is a network"
        ) from None
    except (datasets.exceptions.DatasetNotFoundError, FileNotFoundError) as error:
        raise UserError(f"{where}: no file or folder of that name here, and no such hub data set ({error})") from None
    except ValueError as error:
        if "split" in str(error).lower():
            raise UserError(f"{label}.split={source.split}: {error}") from None
        if "config" in str(error).lower():
            raise UserError(f"{label}.name={source.name}: {error}") from None
        raise UserError(f"{where}: {error}") from None
    except DatasetGenerationError as error:
        raise UserError(f"{where}: cannot be read ({error.__cause__ or error})") from None
