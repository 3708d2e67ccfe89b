"""The syntax of `split` in the datasets library: a name, a part of it such as train[:10%], or several joined by +."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from trainer.config import UserError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_PART = re.compile(r"^\s*([\w.-]+)\s*(\[.*\])?(\(\w+\))?\s*$")
_NAME = re.compile(r"\w[\w.-]*")
_COUNTS = re.compile(r"^\[(\d*):(\d*)\]$")


def split_names(split: str, label: str) -> list[str]:
    """Return the names in a split. Raises UserError if it cannot be parsed."""
    if _NAME.fullmatch(split):
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


def no_such_split(label: str, split: str, path: str) -> str:
    """Return the error for a missing split."""
    return (
        f"{label}.split={split}: {path} has no such split; remove the setting, write train[:100] for a part, "
        "or name the file that holds the split"
    )


def read_split(
    split: str, label: str, read: "Callable[[str], Dataset | IterableDataset]"
) -> "Dataset | IterableDataset":
    """Return the records of a split; `read(name)` reads a whole one. Raises UserError if the part is empty."""
    from datasets import concatenate_datasets

    names = split_names(split, label)
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
            raise UserError(f"{label}.split={spec}: selects none of the {len(records):,} records; use a larger part")
        return records.select(range(bounds.from_, bounds.to))
    counts = _COUNTS.match(spec.removeprefix(name))
    if counts is None:
        raise UserError(
            f"{label}.split={spec}: the length of a stream is not known in advance; write counts, such "
            f"as {name}[:1000], or set dataset.streaming: false"
        )
    first = int(counts.group(1) or 0)
    records = records.skip(first) if first else records
    return records.take(max(0, int(counts.group(2)) - first)) if counts.group(2) else records
