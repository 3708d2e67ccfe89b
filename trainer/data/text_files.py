"""Read records from JSON, CSV and text files without guessing types.

A record is passed on as one JSON string (`RAW_COLUMN`) until `parse_row` decodes it, so that `007`, `NA` and
`2024-01-01` stay unchanged and records in one file may have different fields. A line that cannot be read is passed on
as an error message, which `parse_row` raises; its caller decides whether to stop or to skip the line. Errors that
concern an entire file raise UserError at once. Messages name the file, the line and the offset of bytes that are not
text.
"""

import codecs
import csv
import gzip
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

from trainer.config import UserError
from trainer.config.errors import format_count
from trainer.data.formats import describe_type

RAW_COLUMNS = RAW_COLUMN, PLACE_COLUMN = "zerolora_record", "zerolora_place"
SEPARATORS = ",;\t|"
# Number of lines used to detect a CSV file's separator.
_SNIFFED_LINES = 20
csv.field_size_limit(sys.maxsize)  # an answer in a cell may be longer than the default limit, 128 KiB


class _BadLine(str):
    """An error message in place of a line that cannot be read."""


def read_raw_records(
    files: list[str], kind: str, where: str, text_mode: str = "line", state: Any = None
) -> Iterator[dict[str, str]]:
    """Yield the records in files of one kind (json, csv, text), in order; UserErrors are prefixed with `where`.

    `state` is unused; passing it makes the datasets library cache the records of changed files under another name.
    """
    readers: dict[str, Callable[..., Iterator[tuple[str, str]]]] = {
        "json": _read_json_records,
        "csv": _read_csv_records,
        "text": partial(_read_text_records, mode=text_mode),
    }
    for file in map(Path, files):
        for place, text in readers[kind](file, where):
            yield {RAW_COLUMN: text, PLACE_COLUMN: f"{place} of {file.name}"}


def describe_record(where: str, number: int, row: Mapping[str, Any]) -> str:
    """Return the name of a record for messages, with its place in the file if that has another number."""
    place = row.get(PLACE_COLUMN, "")
    return f"{where}, record {number}" + f" ({place})" * (place.split()[1:2] not in ([], [str(number)]))


def parse_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Decode the record in a row from any source. Raises UserError for a line that could not be read."""
    if RAW_COLUMN not in row:
        return {name: _remove_padding(value) for name, value in row.items()}
    record = json.loads(row[RAW_COLUMN])
    if isinstance(record, str):
        raise UserError(record)
    return dict(record)


def _remove_padding(value: Any) -> Any:
    """Remove the nulls that Arrow adds to give all records of a column the same keys."""
    if isinstance(value, Mapping):
        return {key: _remove_padding(inner) for key, inner in value.items() if inner is not None}
    return [_remove_padding(inner) for inner in value] if isinstance(value, list) else value


LFS_POINTER = "is a Git LFS pointer, not the data; fetch the data with git lfs pull"
_PROBLEM_BY_BEGINNING = {
    b"version https://git-lfs": LFS_POINTER,
    b"\x1f\x8b": "is compressed with gzip; rename it to end in .gz",
    rb"\x28\xb5\x2f\xfd": "is compressed with zstd; unpack it",
    b"PK\x03\x04": "is a zip archive or spreadsheet; unpack it, or export the sheet as CSV",
    rb"[^\r\n]*\r[^\n]+\Z": "has line breaks of classic Mac OS (CR); convert them with tr '\\r' '\\n'",
    b"PAR1\x15": "is a Parquet file; rename it to end in .parquet",
}


def is_lfs_pointer(file: Path) -> bool:
    with file.open("rb") as stream:
        return _PROBLEM_BY_BEGINNING.get(stream.read(23)) == LFS_POINTER


def get_data_suffix(path: Path) -> str:
    """Return the file's suffix in lower case, ignoring .gz."""
    return Path(path.stem if path.suffix.lower() == ".gz" else path.name).suffix.lower()


def _read_lines(file: Path, where: str, *, keep_bad: bool = False) -> Iterator[str]:
    """Yield the decoded lines of a file, with their line endings; .gz files are decompressed.

    Raises UserError for a line that is not text, or yields it as a `_BadLine` if `keep_bad` is set.
    """
    number = offset = 0
    try:
        with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                for beginning, problem in _PROBLEM_BY_BEGINNING.items() if number == 1 else ():
                    if re.match(beginning, line):
                        raise UserError(f"{where}: {file.name} {problem}")
                # Files joined with cat may have more than one.
                start = len(codecs.BOM_UTF8) if line.startswith(codecs.BOM_UTF8) else 0
                text = _decode(line[start:], f"{where}: line {number} of {file.name}", offset + start)
                yield text if keep_bad else _reject_bad_line(text)
                offset += len(line)
    except EOFError:
        problem = f"is truncated after line {number}; copy it again"
    except (gzip.BadGzipFile, zlib.error) as error:
        problem = f"is damaged after line {number} ({error}); copy it again"
        if not number:
            problem = f"has the suffix .gz, but is not gzip-compressed ({error}); rename it"
    except OSError as error:
        problem = f"cannot be read ({error.strerror}); fix its permissions, or copy it"
    else:
        return
    raise UserError(f"{where}: {file.name} {problem}")


def _decode(line: bytes, location: str, offset: int) -> str:
    """Decode a line, or return a _BadLine if it is not text. `offset` is the line's position in the file."""
    if (at := line.find(b"\0")) >= 0:
        problem = f"has a NUL byte (offset {offset + at})"
        return _BadLine(f"{location} {problem}; copy the file again, or convert UTF-16 with iconv -f UTF-16 -t UTF-8")
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        return _BadLine(
            f"{location} is not UTF-8 text (byte 0x{line[error.start]:02x} at offset {offset + error.start}); "
            "convert the file, for example Western European text with iconv -f LATIN1 -t UTF-8"
        )


def _reject_bad_line(line: str) -> str:
    """Raise UserError for a `_BadLine`. Return any other line."""
    if isinstance(line, _BadLine):
        raise UserError(line)
    return line


def _read_text_records(file: Path, where: str, mode: str) -> Iterator[tuple[str, str]]:
    """Yield each line, each paragraph or the entire file as a record, unless it is blank."""

    def find_group(line: tuple[int, str]) -> int | bool:
        return line[0] if mode == "line" else mode == "file" or bool(line[1].strip())

    for _, group in groupby(enumerate(_read_lines(file, where), start=1), key=find_group):
        numbers, parts = zip(*group, strict=True)
        if (text := "".join(parts)).strip():
            yield f"line {numbers[0]}", json.dumps({"text": text.rstrip("\r\n")})


def _read_json_records(file: Path, where: str) -> Iterator[tuple[str, str]]:
    """Yield the objects in a file as JSON: one per line, the items of a single list, or a single object."""
    lines = enumerate(_read_lines(file, where, keep_bad=True), start=1)
    nonblank = ((number, line) for number, line in lines if line.strip())
    number, first = next(nonblank, (0, ""))
    begin = first.strip()
    # Whether this is the first line of an object that spans several lines.
    is_multiline = begin == "{" or (begin.endswith(("[", "{", ",")) and begin.count('"') % 2 == 0)
    is_single = begin.startswith("[") or (begin.startswith("{") and is_multiline)
    second = None if is_single else next(nonblank, None)
    if second is None:
        text = "".join(map(_reject_bad_line, chain([first], (line for _, line in lines))))
        if begin:
            yield from _read_json_items(_parse_json(text, file, where, number), file, where)
        return
    for at, line in chain([(number, first), second], nonblank):
        try:
            record = _parse_json(_reject_bad_line(line).strip(), file, where, at)
            if not isinstance(record, dict):
                raise UserError(f"{where}: line {at} of {file.name} {_describe_wrong_type(record)}")
            yield f"line {at}", line
        except UserError as error:
            yield f"line {at}", json.dumps(str(error))


def _parse_json(text: str, file: Path, where: str, line: int) -> Any:
    """Parse the JSON that starts at `line` of a file. Raises UserError if it is invalid."""
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        several = error.msg == "Extra data"
        if several and text.lstrip().startswith("[") and error.lineno > 1:
            raise UserError(f"{where}: line {line} of {file.name} {_describe_wrong_type([])}") from None
        problem = "extra data after the first value" if several else error.msg
        fix = "write one record per line" if several else "fix or remove it"
        place = f"{where}: line {line + error.lineno - 1} of {file.name}"
        raise UserError(f"{place} is not JSON ({problem}, column {error.colno}); {fix}") from None
    except (RecursionError, ValueError) as error:  # too deep, a number of more than 4300 digits, or a repeated key
        place = f"{where}: line {line} of {file.name}"
        raise UserError(f"{place} cannot be parsed as JSON ({error}); fix or remove it") from None


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"repeated key {next(key for key in keys if keys.count(key) > 1)!r}")
    return built


_DECODER = json.JSONDecoder(object_pairs_hook=_build_object)


def _describe_wrong_type(value: Any) -> str:
    return f'is {describe_type(value)}, not a record such as {{"prompt": "...", "completion": "..."}}'


def _read_json_items(value: Any, file: Path, where: str) -> Iterator[tuple[str, str]]:
    if not isinstance(value, list | dict):
        raise UserError(f"{where}: {file.name} {_describe_wrong_type(value)}")
    for number, record in enumerate([value] if isinstance(value, dict) else value, start=1):
        if not isinstance(record, dict):
            record = f"{where}: item {number} of {file.name} {_describe_wrong_type(record)}"
        yield f"item {number}", json.dumps(record)


def _read_csv_records(file: Path, where: str) -> Iterator[tuple[str, str]]:
    """Yield a record per row: cells as strings, with field names from the first line."""
    lines = _read_lines(file, where)
    sniffed = list(islice(lines, _SNIFFED_LINES))
    has_tabs = get_data_suffix(file) == ".tsv" and "\t" in "".join(sniffed)
    separator = "\t" if has_tabs else detect_separator(sniffed)
    reader = csv.reader(chain(sniffed, lines), delimiter=separator, strict=True)
    names: list[str] = []
    begin = 1
    try:
        for cells in reader:
            line, begin = f"line {begin}", reader.line_num + 1
            place = f"{where}: {line} of {file.name}"
            # Blank lines, and the first line that Excel reads as the separator.
            if (len(cells) < 2 and not "".join(cells).strip()) or (not names and cells[0] == "sep="):
                continue
            if not names:
                if cells[0].startswith(("{", "[")):
                    raise UserError(f"{place} is JSON, not CSV; rename the file to end in .jsonl")
                names = [cell.strip() or f"column {number}" for number, cell in enumerate(cells, start=1)]
                if duplicates := sorted({name for name in names if names.count(name) > 1}):
                    raise UserError(f"{place} repeats the column {', '.join(duplicates)}; use different names")
                continue
            while len(cells) > len(names) and not cells[-1]:
                cells.pop()
            if len(cells) == len(names):
                yield line, json.dumps(dict(zip(names, cells, strict=True)))
                continue
            shown = {"\t": "a tab"}.get(separator, separator)
            problem = f"has {format_count(len(cells), 'cell')}, but the header has {len(names)} (separated by {shown})"
            fix = "quote cells containing separators, and remove lines above the header"
            yield line, json.dumps(f"{place} {problem}; {fix}")
    except csv.Error as error:
        fix = 'enclose quoted cells in ", and write " inside them as ""'
        raise UserError(f"{where}: line {begin} of {file.name} is not CSV ({error}); {fix}") from None


def detect_separator(lines: list[str]) -> str:
    """Return the separator that splits the first line into the most cells; a comma if none splits it."""
    first = [line for line in lines if line.strip()][:1]
    cells = {separator: sum(len(row) for row in csv.reader(first, delimiter=separator)) for separator in SEPARATORS}
    return max(SEPARATORS, key=lambda separator: cells[separator])
