"""Odd data: read as it stands, or refused in one line that names the file, the place in it and the fix."""

import gzip
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import pytest

from trainer.config import SourceSection, UserError
from trainer.data.sources import compute_content_key, read_rows, read_source
from trainer.data.text_files import parse_row

PAIR = {"prompt": "p", "completion": "c"}
LINE = json.dumps(PAIR) + "\n"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def read(path: str, *, streaming: bool = False, **settings: Any) -> list[dict[str, Any]]:
    source = SourceSection(path=path, **settings)
    if not streaming:
        compute_content_key(source, "dataset")
    return list(map(parse_row, read_rows(read_source(source, "dataset", streaming=streaming), source, "dataset")))


def write(name: str, content: str | bytes) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)


def pairs(*texts: str) -> list[dict[str, str]]:
    return [
        {"prompt": prompt, "completion": completion} for prompt, completion in zip(texts[::2], texts[1::2], strict=True)
    ]


READ: dict[str, tuple[str, str | bytes, list[dict[str, Any]]]] = {
    "numbers and NA in CSV": (
        "a.csv",
        "prompt,completion\n007,NA\n1e3,None\ntrue,\n",
        pairs("007", "NA", "1e3", "None", "true", ""),
    ),
    "quotes and line breaks in CSV": (
        "a.csv",
        'prompt,completion\n"a ""b"", c","one\ntwo"\n\n5" pipe,x\n',
        pairs('a "b", c', "one\ntwo", '5" pipe', "x"),
    ),
    "semicolons": ("a.csv", "prompt;completion\na,b;c\n", pairs("a,b", "c")),
    "tabs in CSV": ("a.csv", "prompt\tcompletion\na, b\tc\n", pairs("a, b", "c")),
    "TSV with commas in its head": ("a.tsv", "prompt\tcompletion\na,b\tc;d\n", pairs("a,b", "c;d")),
    "CSV of Excel": ("a.csv", "\ufeffprompt,completion\r\na,b\r\n", pairs("a", "b")),
    "an index column without a name": (
        "a.csv",
        ",prompt,completion\n0,a,b\n",
        [{"column 1": "0", **pairs("a", "b")[0]}],
    ),
    "a separator for Excel": ("a.csv", "sep=;\nprompt;completion\na;b\n", pairs("a", "b")),
    "spaces above the head": ("a.csv", "  \nprompt,completion\na,b\n \n", pairs("a", "b")),
    "TSV without tabs": ("a.tsv", "prompt,completion\na,b\n", pairs("a", "b")),
    "joined files": ("a.jsonl", f"\ufeff{LINE}\ufeff{LINE}", [PAIR, PAIR]),
    "a comma at every end": ("a.csv", "prompt,completion\na,b,\n", pairs("a", "b")),
    "a long cell": ("a.csv", "text\n" + "x" * 200_000 + "\n", [{"text": "x" * 200_000}]),
    "dates": ("a.jsonl", '{"prompt": "when", "completion": "2024-01-01"}\n', pairs("when", "2024-01-01")),
    "fields of several types": (
        "a.jsonl",
        '{"text": "a", "id": 1}\n{"text": "b", "id": "x"}\n',
        [{"text": "a", "id": 1}, {"text": "b", "id": "x"}],
    ),
    "a field that begins late": (
        "a.jsonl",
        '{"text": "a"}\n{"text": "b", "c": {}}\n',
        [{"text": "a"}, {"text": "b", "c": {}}],
    ),
    "one record": ("a.json", json.dumps(PAIR, indent=2), [PAIR]),
    "one conversation": (
        "a.json",
        json.dumps({"messages": [{"role": "user", "content": "x"}]}),
        [{"messages": [{"role": "user", "content": "x"}]}],
    ),
    "one list in a line": ("a.jsonl", json.dumps([PAIR, PAIR]), [PAIR, PAIR]),
    "a list in .jsonl": ("a.jsonl", json.dumps([PAIR, PAIR], indent=1), [PAIR, PAIR]),
    "no line break at the end, blank lines": ("a.jsonl", "\n\n" + LINE + "\n" + LINE.strip(), [PAIR, PAIR]),
    "line breaks of Windows": ("a.jsonl", (LINE + LINE).replace("\n", "\r\n"), [PAIR, PAIR]),
    "separators of Unicode": (
        "a.jsonl",
        json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False) + "\n",
        [{"text": "a\u2028b\x85c"}],
    ),
    "CSV in gzip": ("a.csv.gz", gzip.compress(b"prompt,completion\np,c\n"), [PAIR]),
    "text in gzip": ("a.txt.gz", gzip.compress("é\n".encode()), [{"text": "é"}]),
    "capitals": ("A.JSONL", LINE, [PAIR]),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", READ)
def test_is_read_as_it_stands(name: str, streaming: bool) -> None:
    file, content, expected = READ[name]
    write(file, content)
    assert read(file, streaming=streaming) == expected


GZIPPED = gzip.compress((LINE * 1000).encode())
REFUSED: dict[str, tuple[str, str | bytes, tuple[str, ...]]] = {
    "latin-1 in the second line": (
        "a.jsonl",
        LINE.encode() + '{"text": "caf\xe9"}'.encode("latin-1"),
        ("line 2 of a.jsonl is not UTF-8", f"0xe9 at offset {len(LINE) + 13}", "iconv"),
    ),
    "latin-1 CSV": (
        "a.csv",
        "prompt,completion\nna\xefve,x\n".encode("latin-1"),
        ("line 2 of a.csv is not UTF-8", "0xef at offset 20"),
    ),
    "latin-1 text": ("a.txt", b"caf\xe9\n", ("line 1 of a.txt is not UTF-8", "0xe9 at offset 3")),
    "UTF-16": ("a.jsonl", LINE.encode("utf-16"), ("line 1 of a.jsonl has a NUL byte", "iconv -f UTF-16 -t UTF-8")),
    "UTF-16 CSV of Excel": ("a.csv", "prompt\tcompletion\n".encode("utf-16"), ("line 1 of a.csv has a NUL byte",)),
    "NUL bytes": ("a.txt", b"ab\n\0\0\n", ("line 2 of a.txt has a NUL byte (offset 3)",)),
    "NUL bytes in JSON": ("a.jsonl", LINE.encode() + b"\0" * 100, ("line 2 of a.jsonl has a NUL byte",)),
    "a cut .gz": (
        "a.jsonl.gz",
        GZIPPED[:-20],
        ("a.jsonl.gz is truncated after line", "copy it again"),
    ),
    "a false .gz": ("a.jsonl.gz", LINE, ("a.jsonl.gz has the suffix .gz, but is not gzip-compressed", "rename")),
    "a damaged .gz": (
        "a.jsonl.gz",
        GZIPPED[:-8] + b"\0" * 8,
        ("a.jsonl.gz is damaged after line", "copy it again"),
    ),
    "bzip2": ("a.jsonl.bz2", "x", (".bz2 is not supported; unpack it",)),
    "a folder in .tar.gz": ("a.tar.gz", "x", (".gz is not supported; unpack it",)),
    "two records on a line": (
        "a.jsonl",
        LINE.strip() + LINE,
        ("line 1 of a.jsonl is not JSON (extra data after the first value", "write one record per line"),
    ),
    "zstd": ("a.jsonl.zst", "x", (".zst is not supported; unpack it",)),
    "lists on lines": ("a.jsonl", '["a", "b"]\n["c", "d"]\n', ("line 1 of a.jsonl is a list, not a record",)),
    "a list of texts": ("a.json", '["a", "b"]', ("item 1 of a.json is a string, not a record",)),
    "a list of lists": ("a.json", "[[1, 2], [3]]", ("item 1 of a.json is a list, not a record",)),
    "a list with a hole": ("a.json", json.dumps([PAIR, None]), ("item 2 of a.json is null, not a record",)),
    "a text": ("a.json", '"hello"', ("a.json is a string, not a record",)),
    "a list that is cut": ("a.json", json.dumps([PAIR, PAIR], indent=1)[:-6], ("of a.json is not JSON",)),
    "single quotes": ("a.jsonl", "{'text': 'a'}\n" + LINE, ("line 1 of a.jsonl is not JSON",)),
    "a comma after each": (
        "a.jsonl",
        LINE.strip() + ",\n" + LINE.strip() + ",\n",
        ("line 1 of a.jsonl is not JSON (extra data",),
    ),
    "too deep": ("a.jsonl", "[" * 100_000, ("line 1 of a.jsonl cannot be parsed as JSON",)),
    "too long a number": (
        "a.jsonl",
        '{"text": ' + "9" * 5000 + "}\n",
        ("line 1 of a.jsonl cannot be parsed as JSON",),
    ),
    "a repeated key": (
        "a.jsonl",
        LINE + '{"text": "a", "text": "b"}\n',
        ("line 2 of a.jsonl cannot be parsed as JSON (repeated key 'text'); fix or remove it",),
    ),
    "HTML": ("a.json", "<!DOCTYPE html>\n<html></html>\n", ("line 1 of a.json is not JSON",)),
    "a Git LFS pointer": (
        "a.jsonl",
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        ("a.jsonl is a Git LFS pointer", "git lfs pull"),
    ),
    "a parquet file by another name": ("a.jsonl", b"PAR1\x15\x04\x15", ("a.jsonl is a Parquet file; rename it",)),
    "a sheet by another name": ("a.csv", b"PK\x03\x04\0\xff\n", ("a.csv is a zip archive or spreadsheet; unpack",)),
    "zstd by another name": ("a.jsonl", b"\x28\xb5\x2f\xfd\0", ("a.jsonl is compressed with zstd; unpack it",)),
    "line breaks of old Macs": ("a.csv", "text\ra\rb\r", ("a.csv has line breaks of classic Mac OS (CR); convert",)),
    "text of old Macs": ("a.txt", "a\rb\rc", ("a.txt has line breaks of classic Mac OS (CR); convert",)),
    "a cut parquet file": (
        "a.parquet",
        b"PAR1" + b"x" * 50,
        ("dataset.path=a.parquet: a.parquet is truncated or not Parquet; copy or rename it",),
    ),
    "a row too long": (
        "a.csv",
        "prompt,completion\na,b\nI said, well, yes,no\n",
        ("line 3 of a.csv has 4 cells, but the header has 2 (separated by ,)", "quote cells"),
    ),
    "a row too short": ("a.csv", "prompt,completion\na\n", ("line 2 of a.csv has 1 cell, but the header has 2",)),
    "a quote that never ends": ("a.csv", 'prompt,completion\n"a,b\nc,d\n', ("line 2 of a.csv is not CSV",)),
    "a quote within quotes": (
        "a.csv",
        'prompt,completion\nx,"a "b" c"\n',
        ("line 2 of a.csv is not CSV", '" inside them as ""'),
    ),
    "two columns of one name": (
        "a.csv",
        "text,text\na,b\n",
        ("line 1 of a.csv repeats the column text",),
    ),
    "a head alone": ("a.csv", "prompt,completion\n", ("dataset.path=a.csv: has no records",)),
    "white space": ("a.jsonl", " \n\n\t\n", ("dataset.path=a.jsonl: has no records",)),
    "an empty list": ("a.json", "[]", ("dataset.path=a.json: has no records",)),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_in_one_line(name: str, streaming: bool) -> None:
    file, content, needles = REFUSED[name]
    write(file, content)
    if streaming and "no records" in needles[0]:
        assert read(file, streaming=True) == []  # refused where it is trained on
        return
    with pytest.raises(UserError) as caught:
        read(file, streaming=streaming)
    assert str(caught.value).startswith(f"dataset.path={file}: ")
    assert [needle for needle in needles if needle not in str(caught.value)] == [], caught.value
    assert len(str(caught.value)) < 300


def make_special(name: str) -> str:
    if name == "a pipe":
        os.mkfifo("a.jsonl")
    elif name == "a socket":
        socket.socket(socket.AF_UNIX).bind("a.jsonl")
    elif name == "a folder":
        Path("a.jsonl").mkdir()
    elif name == "a loop":
        Path("a.jsonl").symlink_to("a.jsonl")
    return {
        "a device": "/dev/zero",
        "a long name": "x/" * 2500 + "a.jsonl",
        "NUL": "a\0b.jsonl",
        "nothing": " ",
        "an address": "https://x.y/a.jsonl",
    }.get(name, "a.jsonl")


SPECIAL = {
    "a pipe": "is a pipe, socket or device, but data is read more than once; write it to a file",
    "a socket": "is a pipe, socket or device, but data",
    "a device": "is a pipe, socket or device, but data",
    "a folder": "the folder has no data files",
    "a loop": "a.jsonl is a symlink to a.jsonl, which leads back to it; fix the path, or the link",
    "nothing": "dataset.path= : is empty; use a file",
    "an address": "this kind of URL is not supported; download it, or use a Hub dataset",
}


@pytest.mark.parametrize("name", SPECIAL)
def test_what_is_no_file(name: str) -> None:
    with pytest.raises(UserError) as caught:
        read(make_special(name))
    assert SPECIAL[name] in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_no_file_in_a_folder(streaming: bool) -> None:
    write("folder/b.jsonl", LINE)
    file = Path("folder/a.jsonl")
    file.symlink_to("missing.jsonl")
    with pytest.raises(
        UserError, match=r"folder: .*a.jsonl is a symlink to missing.jsonl, which does not exist; replace"
    ):
        read("folder", streaming=streaming)
    assert len(read("folder", streaming=streaming, data_files=["b.jsonl"])) == 1
    file.unlink()
    file.symlink_to("a.jsonl")
    with pytest.raises(UserError, match=r"folder: .*a.jsonl is a symlink to a.jsonl, which leads back to it; replace"):
        read("folder", streaming=streaming)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UserError, match=r"dataset.path=folder: a.jsonl is a pipe, socket or device; replace or"):
        read("folder", streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_parquet_files_with_other_columns(streaming: bool) -> None:
    Path("folder").mkdir()
    datasets.Dataset.from_list([PAIR]).to_parquet("folder/a.parquet")
    datasets.Dataset.from_list([{"prompt": "p"}]).to_parquet("folder/b.parquet")
    assert len(read("folder", streaming=streaming)) == 2
    datasets.Dataset.from_list([{"prompt": "p", "id": 1}]).to_parquet("folder/c.parquet")
    with pytest.raises(UserError, match=r"folder: c.parquet has id, but a.parquet has only prompt, completion; use"):
        read("folder", streaming=streaming)


@contextmanager
def without_rights() -> Iterator[None]:
    """As a user who is not root, whom no file refuses; in a folder that others may enter."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        if folder.owner() == Path.cwd().owner() and folder.stat().st_mode & 0o055 != 0o055:
            folder.chmod(folder.stat().st_mode | 0o055)
    before = os.geteuid()
    os.seteuid(65534 if before == 0 else before)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.mark.parametrize("streaming", [False, True])
def test_no_right_to_read(streaming: bool) -> None:
    for name in ("a.jsonl", "b.jsonl", "folder/a.jsonl"):
        write(name, LINE)
    Path("a.jsonl").chmod(0)
    Path("folder").chmod(0)
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    cache.mkdir()
    cache.chmod(0o555)
    with (
        without_rights(),
        pytest.raises(UserError, match=r"b.jsonl: cannot be read, because .*/hf\S* cannot be written"),
    ):
        read("b.jsonl", streaming=streaming)
    cache.chmod(0o777)
    expected = {
        "a.jsonl": "a.jsonl: a.jsonl cannot be read (Permission denied); fix its permissions",
        "folder": "folder: the folder cannot be read (Permission denied); fix its permissions",
        "folder/a.jsonl": "folder/a.jsonl: cannot be read (Permission denied)",
    }
    for name, message in expected.items():
        with without_rights(), pytest.raises(UserError, match=re.escape(message)):
            read(name, streaming=streaming)
    Path("folder").chmod(0o755)


NUMBERED = [{"text": str(number)} for number in range(20)]
SPLITS: dict[str, tuple[str, list[int] | str]] = {
    "train[:3]": ("a.jsonl", [0, 1, 2]),
    "train[18:]": ("a.jsonl", [18, 19]),
    "train[2:4]": ("a.jsonl", [2, 3]),
    "train[-2:]": ("a.jsonl", [18, 19]),
    "train[50%:60%]": ("a.jsonl", [10, 11]),
    "train[:2]+train[10%:20%]": ("a.jsonl", [0, 1, 2, 3]),
    "train": ("validation.jsonl", list(range(20))),
    "dev": ("validation.jsonl", list(range(20))),
    "validation[:1]": ("folder", [7]),
    "train[:1]+validation[:1]": ("folder", [0, 7]),
    "validation": ("a.jsonl", "dataset.split=validation: a.jsonl has no such split; remove the setting"),
    "test[:2]": ("a.jsonl", "dataset.split=test: a.jsonl has no such split"),
    "test[3:]": ("a.csv", "dataset.split=test: a.csv has no such split"),
    "train[:0]": ("a.jsonl", "dataset.split=train[:0]: selects none of the 20 records"),
    "train[30:]": ("a.jsonl", "dataset.split=train[30:]:"),
    "train[a:b]": ("a.jsonl", "dataset.split=train[a:b]: not a split; use train, train[:1000]"),
    "train[": ("a.jsonl", "dataset.split=train[: not a split"),
    "": ("a.jsonl", "dataset.split=: not a split"),
    "nosuch": ("folder", "dataset.split=nosuch: folder has the splits train, validation"),
    "nosuch[1:]": ("a.parquet", "dataset.split=nosuch: a.parquet has no such split"),
    "nosuch[2:]": ("saved", "dataset.split=nosuch: saved has no such split"),
}


@pytest.mark.parametrize("split", SPLITS)
def test_splits_and_parts_of_them(split: str) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in NUMBERED)
    for name in ("a.jsonl", "validation.jsonl", "folder/train.jsonl"):
        write(name, lines)
    write("folder/dev.jsonl", json.dumps(NUMBERED[7]))
    write("a.csv", "text\n1\n")
    table = datasets.Dataset.from_list(NUMBERED)
    table.to_parquet("a.parquet")
    table.save_to_disk("saved")
    file, expected = SPLITS[split]
    if isinstance(expected, str):
        with pytest.raises(UserError) as caught:
            read(file, split=split)
        assert expected in str(caught.value)
        return
    assert read(file, split=split) == [NUMBERED[number] for number in expected]
    if "%" in split or "-" in split:
        with pytest.raises(UserError, match="the length of a stream is not known"):
            read(file, split=split, streaming=True)
    else:
        assert read(file, split=split, streaming=True) == [NUMBERED[number] for number in expected]
