"""Runs, checkpoints and data on object stores: the copy here, the order of uploads, and what an interrupted one leaves.

The store is fsspec's in memory; tests/servers/test_s3.py does the same with a real server.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.runs_in_process import make_ground, train
from trainer.checkpoint.checkpoint_files import describe_damage
from trainer.checkpoint.finished_run import find_run
from trainer.config import UserError, load_config
from trainer.config.paths import get_local_path, get_remote_url, is_remote
from trainer.contract import object_store
from trainer.contract.object_store import fetch_data, open_run

URL = "memory://bucket/run"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFileSystem]:
    monkeypatch.setenv("ZEROLORA_CACHE", str(tmp_path / "here"))
    found = fsspec.filesystem("memory")
    found.store.clear()
    yield found
    found.store.clear()


def names(store: MemoryFileSystem) -> set[str]:
    return {path.removeprefix("/bucket/run/") for path in store.find("/bucket/run")}


def move_to_another_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ZEROLORA_CACHE", str(tmp_path / "there"))


def test_a_run_is_uploaded_and_continued_on_another_machine(
    store: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground = make_ground(tmp_path / "ground")
    shown = train(ground, output_dir=URL, training__max_steps=4, training__save_steps=1, training__save_total_limit=2)
    assert "warning" not in shown and f"uploaded     {URL}" in shown
    stored = names(store)
    assert {name.partition("/")[0] for name in stored if name.startswith("checkpoint-")} == {
        "checkpoint-3",
        "checkpoint-4",
    }
    assert {"adapter_model.safetensors", "run.json", "metrics.jsonl", "report.html"} <= stored
    with pytest.raises(UserError, match="contains another run"):
        train(ground, output_dir=URL)
    move_to_another_machine(monkeypatch, tmp_path)
    with pytest.raises(UserError, match="contains another run"):  # which only the store has
        train(ground, output_dir=URL)
    shown = train(ground, output_dir=URL, training__max_steps=6, training__resume_from_checkpoint="latest")
    assert "resumed from" in shown and "at step 4" in shown
    assert json.loads(store.cat_file("/bucket/run/checkpoint-6/state.json"))["step"] == 6
    folder = open_run(URL)
    assert find_run(folder).config.output_dir == str(folder) == str(get_local_path(URL))
    assert open_run(f"{URL}/checkpoint-6") == folder / "checkpoint-6"
    assert describe_damage(folder / "checkpoint-6") is None


def test_a_checkpoint_damaged_on_the_store_is_skipped(
    store: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground = make_ground(tmp_path / "ground")
    train(ground, output_dir=URL, training__max_steps=4, training__save_steps=2)
    content = store.cat_file("/bucket/run/checkpoint-4/adapter_model.safetensors")
    store.pipe_file("/bucket/run/checkpoint-4/adapter_model.safetensors", content[:-1] + bytes([content[-1] ^ 1]))
    move_to_another_machine(monkeypatch, tmp_path)
    shown = train(ground, output_dir=URL, training__max_steps=4, training__resume_from_checkpoint="latest")
    assert "skipped checkpoint-4 (adapter_model.safetensors is damaged" in " ".join(shown.split())
    assert "at step 2" in shown


def test_an_interrupted_upload_is_no_checkpoint_and_training_continues(
    store: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground, put, sent = make_ground(tmp_path / "ground"), MemoryFileSystem.put_file, []

    def fail_in_second_checkpoint(self: Any, source: str, target: str, **more: Any) -> None:
        sent.append(target)
        if "checkpoint-2/" in target and len([name for name in sent if "checkpoint-2/" in name]) == 2:
            raise ConnectionError("the network is down")
        put(self, source, target, **more)

    monkeypatch.setattr(MemoryFileSystem, "put_file", fail_in_second_checkpoint)
    during: list[set[str]] = []
    upload = object_store.upload_run

    def note_what_is_there(*given: Any, **options: Any) -> str | None:
        try:
            return upload(*given, **options)
        finally:
            during.append(names(store))

    monkeypatch.setattr("trainer.checkpoint.checkpoint_manager.upload_run", note_what_is_there)
    shown = " ".join(train(ground, output_dir=URL, training__max_steps=3, training__save_steps=1).split())
    assert f"not uploaded: {URL}: cannot be accessed (ConnectionError: the network is down)" in shown
    assert "checkpoint-2/COMPLETE" not in during[1] and "checkpoint-1/COMPLETE" in during[1]
    assert {f"checkpoint-{step}/COMPLETE" for step in (1, 2, 3)} <= names(store)  # with the next one
    for step in (1, 2, 3):
        of_step = [name for name in sent if f"checkpoint-{step}/" in name]
        assert of_step[-1].endswith("COMPLETE"), of_step


def test_a_new_run_in_the_place_of_another_keeps_its_checkpoints_here(
    store: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground = make_ground(tmp_path / "ground")
    train(ground, output_dir=URL, training__max_steps=4, training__save_steps=2)
    move_to_another_machine(monkeypatch, tmp_path)
    train(ground, output_dir=URL, training__max_steps=2, training__save_steps=2, output__overwrite=True)
    complete = {name.partition("/")[0] for name in names(store) if name.endswith("/COMPLETE")}
    assert complete == {"checkpoint-2"} and not any(name.startswith("checkpoint-4") for name in names(store))
    assert describe_damage(get_local_path(f"{URL}.1") / "checkpoint-4") is None


def test_data_is_read_from_the_store_and_again_when_it_changes(store: MemoryFileSystem, tmp_path: Path) -> None:
    ground = make_ground(tmp_path / "ground")
    lines = (ground / "train.jsonl").read_text().splitlines(keepends=True)
    store.pipe_file("/bucket/data/part-1.jsonl", "".join(lines[:8]).encode())
    store.pipe_file("/bucket/data/part-2.jsonl", "".join(lines[8:]).encode())
    assert "train: 40 documents" in train(ground, output_dir=str(ground / "1"), dataset__path="memory://bucket/data")
    store.rm_file("/bucket/data/part-2.jsonl")
    assert "train: 8 documents" in train(ground, output_dir=str(ground / "2"), dataset__path="memory://bucket/data")
    copy = fetch_data("memory://bucket/data/part-1.jsonl", "dataset.path")
    assert copy.read_text() == "".join(lines[:8])


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("dataset.path=memory://bucket/gone.jsonl", "no such file or folder; check its name"),
        (
            "dataset.path=nope://bucket/a.jsonl",
            r"dataset.path=nope://bucket/a.jsonl: cannot be accessed \(ValueError: .*; use one of",
        ),
        ("dataset.path=abfs://bucket/a.jsonl", "needs adlfs, which is not installed; pip install adlfs"),
        ("output_dir=https://example.com/run", "is not the URL of an object store; use a folder"),
    ],
)
def test_a_place_that_cannot_be_used_is_named(
    store: MemoryFileSystem, setting: str, problem: str, tmp_path: Path
) -> None:
    ground = make_ground(tmp_path / "ground")
    with pytest.raises(UserError, match=problem):
        fetch_or_load(load_config(ground / "base.yaml", [setting]).config.dataset.path)


def fetch_or_load(path: str | None) -> None:
    assert path is not None and is_remote(path)
    fetch_data(path, f"dataset.path={path}")


def test_names_of_a_store_stay_within_the_copy(store: MemoryFileSystem, tmp_path: Path) -> None:
    assert get_local_path("s3://bucket/../../x/run") == tmp_path / "here" / "stores" / "s3" / "bucket" / "x" / "run"
    assert get_remote_url(get_local_path("s3://bucket/x/run")) == "s3://bucket/x/run"
    assert get_remote_url(tmp_path / "run") is None
