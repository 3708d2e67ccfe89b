"""Files of every kind, folders and splits; and one line for each that cannot be read."""

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from trainer.config import SourceSection, UserError
from trainer.data.sources import compute_content_key, read_rows, read_source
from trainer.data.text_files import parse_row

ROWS = [{"prompt": f"p{index}", "completion": f"c{index}"} for index in range(3)]
LINES = "\n".join(json.dumps(row) for row in ROWS) + "\n"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)


def read(path: str, *, streaming: bool = False, label: str = "dataset", **settings: Any) -> list[dict[str, Any]]:
    source = SourceSection(path=path, **settings)
    return list(map(parse_row, read_rows(read_source(source, label, streaming=streaming), source, label)))


def write_all_kinds() -> None:
    Path("a.jsonl").write_text(LINES)
    Path("bom.jsonl").write_text("\ufeff" + LINES.replace("\n", "\n\n"))
    Path("a.json").write_text(json.dumps(ROWS, indent=2))
    Path("lines.json").write_text(LINES)
    Path("a.csv").write_text("prompt,completion\np0,c0\np1,c1\np2,c2\n")
    Path("a.tsv").write_text("prompt\tcompletion\np0\tc0\np1\tc1\np2\tc2\n")
    with gzip.open("a.jsonl.gz", "wt") as file:
        file.write(LINES)
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet("a.parquet")
    table.save_to_disk("saved")
    datasets.DatasetDict(train=table, other=table.select([0])).save_to_disk("saved_splits")
    for name in ("train-00001-of-00002", "train-00000-of-00002", "validation"):
        folder = Path("folder/data")
        folder.mkdir(parents=True, exist_ok=True)
        rows = {"train-00000-of-00002": ROWS[:2], "train-00001-of-00002": ROWS[2:], "validation": ROWS[:1]}[name]
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{name}.parquet")
    Path("folder/README.md").write_text("# About\n")


KINDS = ["a.jsonl", "bom.jsonl", "a.json", "lines.json", "a.csv", "a.tsv", "a.jsonl.gz", "a.parquet", "saved", "folder"]


@pytest.mark.parametrize("streaming", [False, True])
def test_only_the_files_that_are_named_are_read(streaming: bool) -> None:
    for name in ("part-1", "part-2", "notes"):
        Path("many/deep").mkdir(parents=True, exist_ok=True)
        Path(f"many/deep/{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    texts = lambda *names: [row["text"] for row in read("many", streaming=streaming, data_files=names)]  # noqa: E731
    assert texts("deep/part-2.jsonl") == ["part-2"] and texts("*/part-*") == ["part-1", "part-2"]
    assert texts("deep/notes.jsonl", "deep/part-1.jsonl") == ["notes", "part-1"], "in the order of the names"
    with pytest.raises(UserError, match=r"data_files=deep/part-3.jsonl: no such data file in many; did you mean deep/"):
        texts("deep/part-3.jsonl")
    with pytest.raises(UserError, match=r"data_files=\[x\]: .*is a file; remove data_files"):
        read("many/deep/notes.jsonl", streaming=streaming, data_files=("x",))


@pytest.mark.parametrize("streaming", [False, True])
def test_every_kind_gives_the_same_records(streaming: bool) -> None:
    write_all_kinds()
    assert {name: read(name, streaming=streaming) for name in KINDS} == {name: ROWS for name in KINDS}
    assert read("a.jsonl", streaming=streaming, max_samples=2) == ROWS[:2]
    assert read("folder", streaming=streaming, split="validation") == ROWS[:1]
    assert read("folder", streaming=streaming, split="dev") == ROWS[:1]
    assert read("saved_splits", streaming=streaming, split="other") == ROWS[:1]


@pytest.mark.parametrize(
    ("mode", "texts"),
    [
        ("line", [" one", "still one", "two"]),
        ("paragraph", [" one\nstill one", "two"]),
        ("file", ["\n one\nstill one\n \n\ntwo"]),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_text_is_read_by_lines_paragraphs_or_files(mode: str, texts: list[str], streaming: bool) -> None:
    Path("a.txt").write_text("\n one\nstill one\n \n\ntwo\n")
    assert read("a.txt", streaming=streaming, text_mode=mode) == [{"text": text} for text in texts]


def test_text_mode_is_for_text_only() -> None:
    write_all_kinds()
    with pytest.raises(UserError, match=r"dataset.text_mode=file: .*json"):
        read("a.jsonl", text_mode="file")


def test_tool_calls_of_different_shapes_stay_as_they_are() -> None:
    calls = [[{"function": {"name": "f", "arguments": arguments}}] for arguments in ({"a": 1}, {"b": ["x"]}, {})]
    rows = [
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": call}]} for call in calls
    ]
    Path("calls.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    found = [
        {key: value for key, value in row["messages"][1]["tool_calls"][0]["function"]["arguments"].items() if value}
        for row in read("calls.jsonl")
    ]
    assert found == [{"a": 1}, {"b": ["x"]}, {}]


def test_the_key_follows_the_content() -> None:
    write_all_kinds()

    def key(name: str) -> str:
        return compute_content_key(SourceSection(path=name), "dataset")

    before = key("a.jsonl"), key("folder"), key("saved")
    assert key("a.jsonl") == before[0]
    Path("copy.jsonl").write_text(LINES)
    assert key("copy.jsonl") == before[0]
    Path("copy.jsonl").write_text(LINES.replace("c2", "c3"))
    assert key("copy.jsonl") != before[0]
    datasets.Dataset.from_list(ROWS[1:]).to_parquet("folder/data/train-00000-of-00002.parquet")
    assert key("folder") != before[1]
    assert len(set(before)) == 3


def write_bad_files() -> None:
    files = {
        "empty.jsonl": "",
        "blank.jsonl": "\n\n",
        "broken.jsonl": '{"text": "a"}\n{"text": "b"}\n{"text": \n{"text": "c"}\n',
        "number.jsonl": '{"text": "a"}\n\n5\n',
        "strings.jsonl": '"a"\n"b"\n',
        "broken.json": '[{"text": "a"},\n {"text": }]',
        "ragged.csv": "a,b\n1,2\n1,2,3\n",
        "broken.parquet": "xyz",
        "notes.odt": "x",
        "train.jsonl": LINES,
        "mixed/a.jsonl": LINES,
        "mixed/b.csv": "a\n1\n",
        "nothing/a.odt": "x",
        "splits/train.jsonl": LINES,
        "splits/test.jsonl": LINES,
    }
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    Path("latin.jsonl").write_bytes('{"text": "é"}\n'.encode("latin-1"))
    datasets.DatasetDict(other=datasets.Dataset.from_list(ROWS)).save_to_disk("saved")


BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "trian.jsonl": ({}, ("dataset.path=trian.jsonl: no such file or folder", "did you mean train.jsonl?")),
    "./data/x": ({}, ("dataset.path=./data/x: no such file or folder", "data/x)")),
    "/no/such/folder": ({}, ("dataset.path=/no/such/folder: no such file",)),
    "someone/dataset": ({}, ("dataset.path=someone/dataset: no such file or folder", "Hub", "HF_HUB_OFFLINE is set")),
    "notes.odt": ({}, ("dataset.path=notes.odt: .odt is not supported", ".jsonl", ".parquet")),
    "empty.jsonl": ({}, ("dataset.path=empty.jsonl: has no records",)),
    "blank.jsonl": ({}, ("dataset.path=blank.jsonl: has no records",)),
    "broken.jsonl": ({}, ("dataset.path=broken.jsonl: line 3 of broken.jsonl is not JSON",)),
    "number.jsonl": ({}, ("line 3 of number.jsonl is a number",)),
    "strings.jsonl": ({}, ("line 1 of strings.jsonl is a string",)),
    "broken.json": ({}, ("dataset.path=broken.json: line 2 of broken.json is not JSON",)),
    "latin.jsonl": ({}, ("line 1 of latin.jsonl is not UTF-8 text (byte 0xe9 at offset 10)", "iconv")),
    "ragged.csv": ({}, ("dataset.path=ragged.csv: line 3 of ragged.csv has 3 cells, but the header has 2",)),
    "broken.parquet": ({}, ("dataset.path=broken.parquet: broken.parquet is truncated or not Parquet",)),
    "mixed": ({}, ("dataset.path=mixed: has files of several kinds (csv, json)", "dataset.mix")),
    "nothing": ({}, ("dataset.path=nothing: the folder has no data files",)),
    "splits": ({"split": "validation"}, ("dataset.split=validation: splits has the splits test, train",)),
    "saved": ({}, ("dataset.split=train: saved has the splits other",)),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses_in_one_line(name: str) -> None:
    write_bad_files()
    settings, needles = BAD[name]
    with pytest.raises(UserError) as caught:
        read(name, **settings)
    assert "\n" not in str(caught.value)
    assert [needle for needle in needles if needle not in str(caught.value)] == []


@pytest.mark.parametrize("name", ["broken.jsonl", "number.jsonl", "empty.jsonl", "broken.json", "ragged.csv"])
def test_a_stream_refuses_the_same(name: str) -> None:
    write_bad_files()
    settings, needles = BAD[name]
    with pytest.raises(UserError) as caught:
        read(name, streaming=True, **settings)
    assert [needle for needle in needles if needle not in str(caught.value)] == []


def test_a_stream_refuses_only_where_it_gets_to(tmp_path: Path) -> None:
    good = "".join(json.dumps({"text": "x" * 1000}) + "\n" for _ in range(11_000))  # more than the 10 MB of one read
    Path("late.jsonl").write_text(good + "{broken\n")
    source = SourceSection(path="late.jsonl")
    rows = map(parse_row, read_rows(read_source(source, "dataset", streaming=True), source, "dataset"))
    assert next(rows) == {"text": "x" * 1000}
    with pytest.raises(UserError, match=r"line 11001 of late.jsonl is not JSON"):
        list(rows)
