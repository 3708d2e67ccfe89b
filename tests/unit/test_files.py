"""Every way in which a file can be damaged gives an UnreadableFileError with one line, and never another exception."""

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from trainer.config.files import UnreadableFileError, read_json, read_safetensors_header, read_text

DAMAGED_JSON = {
    "latin-1": "Köln".encode("latin-1"),
    "empty": b"",
    "cut": b'{"a": 1',
    "nested": b"[" * 100_000,
    "list": b"[]",
    "digits": b'{"a": ' + b"9" * 5_000 + b"}",
    "wrong type": b'{"a": "x"}',
}


@pytest.mark.parametrize("name", DAMAGED_JSON)
def test_damaged_json_is_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(DAMAGED_JSON[name])
    with pytest.raises(UnreadableFileError) as caught:
        read_json(path, dict[str, int])
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_json_of_the_right_shape_is_returned(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text('\ufeff{"a": 1}', encoding="utf-8")
    assert read_json(path, dict[str, int]) == {"a": 1}


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, problem in (("pipe", "not a regular file"), (".", "is a folder")):
        with pytest.raises(UnreadableFileError, match=problem):
            read_text(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "missing")
    (tmp_path / "text").write_text("")
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "text" / "below")


@pytest.mark.parametrize("names", range(1, 40))
def test_a_header_of_any_length_is_read(tmp_path: Path, names: int) -> None:
    """One header length in 32 begins with 0x80, which is also how a pickle begins."""
    tensors = {f"layer.{'x' * names}": torch.ones(names, 2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"pad": "p" * (8 * names)})
    entries, metadata, start = read_safetensors_header(tmp_path / "model.safetensors")
    assert {name: entry.shape for name, entry in entries.items()} == {f"layer.{'x' * names}": [names, 2]}
    assert metadata == {"pad": "p" * (8 * names)}
    assert start + 8 * names == (tmp_path / "model.safetensors").stat().st_size


def test_header_lengths_cover_the_byte_of_a_pickle(tmp_path: Path) -> None:
    def first_byte(names: int) -> int:
        save_file({"x": torch.ones(1)}, tmp_path / "m.safetensors", metadata={"pad": "p" * (8 * names)})
        read_safetensors_header(tmp_path / "m.safetensors")
        return (tmp_path / "m.safetensors").read_bytes()[0]

    assert 0x80 in {first_byte(names) for names in range(40)}


def test_a_pointer_to_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12\n")
    with pytest.raises(UnreadableFileError, match=r"a.safetensors.* only a Git LFS pointer; copy or download it again"):
        read_safetensors_header(tmp_path / "a.safetensors")


def test_pickles_and_archives_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    torch.save({"a": torch.ones(2)}, path)
    with pytest.raises(UnreadableFileError, match="convert it to safetensors"):
        read_safetensors_header(path)
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(UnreadableFileError, match="convert it to safetensors"):
        read_safetensors_header(path)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes, framed: bool) -> None:
    path = tmp_path_factory.mktemp("bytes") / "f"
    path.write_bytes(len(content).to_bytes(8, "little") + content if framed else content)
    for read in (read_safetensors_header, read_json):
        with pytest.raises(UnreadableFileError):
            read(path)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_any_json_as_a_header_is_one_line(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    path = tmp_path_factory.mktemp("json") / "f"
    content = json.dumps({"a": value}).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content)
    with pytest.raises(UnreadableFileError):
        read_safetensors_header(path)
