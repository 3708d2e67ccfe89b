"""The cache of tokenized data: whatever is damaged in it is rebuilt with one note, and a full disk is one line."""

import json
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.chaos.disks import FileServer
from tests.tiny import write_chats
from trainer.config import DatasetSection, UserError
from trainer.data import cache as prepare_module
from trainer.data.built_folder import digest_json, load_or_build
from trainer.data.cache import PreparedData, prepare_data
from trainer.data.documents import DocumentEncoder
from trainer.data.samples import Samples

pytestmark = pytest.mark.usefixtures("own_data_folder")


def prepared(tokenizer: PreTrainedTokenizerBase, **settings: Any) -> PreparedData:
    section = DatasetSection(path="chats.jsonl", max_length=64, **settings)
    return prepare_data(section, tokenizer, seed=0, cache_dir=Path("cache"), model_max_length=None)


def tokens(data: PreparedData) -> list[list[int]]:
    assert isinstance(data.train, Samples)
    return [sample.input_ids for sample in data.train]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


DAMAGES: dict[str, Any] = {
    "cut in half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "a byte short": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "empty": lambda file: file.write_bytes(b""),
    "other bytes": lambda file: file.write_bytes(b"\xff\x00garbage" * 50),
    "one bit": flip,
    "missing": Path.unlink,
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_made_good_with_one_note(tokenizer: PreTrainedTokenizerBase, damage: str) -> None:
    write_chats(Path("chats.jsonl"), 10)
    first = prepared(tokenizer)
    expected = tokens(first)
    folder = Path("cache") / first.fingerprint
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["files.json", "index.npz", "source-000.arrow", "stats.json"]
    for name in names:
        DAMAGES[damage](folder / name)
        again = prepared(tokenizer)
        assert tokens(again) == expected, name
        assert again.stats.notes[0].startswith(f"the cached data in {folder} was damaged ("), name
        assert again.stats.notes[0].endswith("and has been rebuilt") and again.stats.notes[1:] == first.stats.notes
        assert prepared(tokenizer).stats == first.stats
    assert sorted(path.name for path in Path("cache").iterdir() if path.suffix != ".lock") == [first.fingerprint]


def test_a_cache_on_a_network_file_system_keeps_nothing_that_was_removed(tokenizer: PreTrainedTokenizerBase) -> None:
    """There a file that is removed while it is mapped stays, under a hidden name, until it is let go."""
    if os.geteuid() != 0 or shutil.which("bindfs") is None:
        pytest.skip("needs root and bindfs: a folder is served by a process (FUSE)")
    write_chats(Path("chats.jsonl"), 10)
    server = FileServer(Path("cache").absolute())
    try:
        first = prepared(tokenizer)
        left = sorted(path.name for path in (Path("cache") / first.fingerprint).iterdir())
        assert prepared(tokenizer).stats == first.stats
        del first
    finally:
        server.close()
    assert left == ["files.json", "index.npz", "source-000.arrow", "stats.json"]


def test_what_a_file_system_keeps_of_removed_files_is_no_part_of_the_data(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "data").write_text("1")
        (folder / "scratch").mkdir()
        (folder / ".nfs0001").write_text("removed")

    read = partial(load_or_build, tmp_path / "built", build, lambda folder: (folder / "data").read_text())
    assert read() == ("1", None)
    (tmp_path / "built" / ".nfs0001").unlink()
    (tmp_path / "built" / "scratch").rmdir()
    assert read() == ("1", None), "no damage: it was let go"


def _prepare_at_once(folder: str, tokenizer_folder: str, start: Any, results: Any) -> None:
    built: list[int] = []
    build = prepare_module._build_cache
    prepare_module._build_cache = lambda *arguments: (built.append(1), build(*arguments))[1]
    section = DatasetSection(path=f"{folder}/chats.jsonl", max_length=64)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    start.wait()
    data = prepare_data(section, tokenizer, seed=0, cache_dir=Path(folder, "cache"), model_max_length=None)
    results.put((len(built), tokens(data)))


def test_several_processes_find_the_damage_and_one_mends_it(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", 10)
    section = DatasetSection(path=str(tmp_path / "chats.jsonl"), max_length=64)
    first = prepare_data(section, tokenizer, seed=0, cache_dir=tmp_path / "cache", model_max_length=None)
    expected = tokens(first)
    flip(tmp_path / "cache" / first.fingerprint / "source-000.arrow")
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(3), context.Queue()
    arguments = (str(tmp_path), tokenizer.name_or_path, start, results)
    processes = [context.Process(target=_prepare_at_once, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(built for built, _ in found) == [0, 0, 1]
    assert [tokens for _, tokens in found] == [expected] * 3


def test_a_finished_cache_is_read_where_nothing_may_be_written(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_chats(Path("chats.jsonl"), 10)
    expected = tokens(prepared(tokenizer))
    for lock in Path("cache").glob("*.lock"):
        lock.unlink()
        lock.mkdir()  # no lock can be had
    assert tokens(prepared(tokenizer)) == expected


@pytest.mark.parametrize("kept", ["data", "folder", "lock"])
def test_an_entry_of_another_user_is_named_and_left_alone(kept: str) -> None:
    """A folder that all may write, as shared caches are, with an entry that its owner keeps to himself."""
    if os.geteuid():
        pytest.skip("needs root, which becomes another user")
    with tempfile.TemporaryDirectory() as place:
        cache = Path(place) / "cache"
        cache.mkdir()
        for folder in (Path(place), cache):
            folder.chmod(0o1777)

        def build(folder: Path) -> None:
            (folder / "data").write_text("1")

        read = partial(load_or_build, cache / "built", build, lambda folder: (folder / "data").read_text())
        if kept == "lock":  # of a build that was killed
            (cache / "built.lock").touch(mode=0o600)
        else:
            assert read() == ("1", None)
            (cache / "built" / ("data" if kept == "data" else "")).chmod(0o600)
        os.seteuid(65534)
        try:
            with pytest.raises(UserError, match="in this folder belongs to another user") as refused:
                read()
        finally:
            os.seteuid(0)
        assert str(refused.value).startswith(f"dataset.cache_dir={cache}: built") or kept == "data"
        assert kept == "lock" or (cache / "built" / "data").read_text() == "1"


def _prepare_with_little_room(tokenizer_folder: str, results: Any) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        prepared(tokenizer)
    except BaseException as error:
        results.put((type(error).__name__, str(error)))


def test_no_room_for_it_is_one_line(tokenizer: PreTrainedTokenizerBase) -> None:
    write_chats(Path("chats.jsonl"), 2000)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=_prepare_with_little_room, args=(tokenizer.name_or_path, results))
    process.start()
    kind, said = results.get(timeout=300)
    process.join()
    assert (kind, "\n" in said) == (UserError.__name__, False), said
    assert said.startswith("dataset.cache_dir=cache: cannot be written (File too large); ")
    assert said.endswith("use another folder")
    assert [path.name for path in Path("cache").glob("*") if path.suffix != ".lock"] == []


def test_the_manifest_is_that_of_the_folder(tokenizer: PreTrainedTokenizerBase) -> None:
    write_chats(Path("chats.jsonl"), 10)
    folder = Path("cache") / prepared(tokenizer, workers=2).fingerprint
    files = json.loads((folder / "files.json").read_text())
    assert {name: size for name, (size, _) in files.items()} == {
        path.name: path.stat().st_size for path in folder.iterdir() if path.name != "files.json"
    }


CHANGES: dict[str, Any] = {
    "path": "b.jsonl", "name": "n", "revision": "r", "data_files": ("a",), "split": "train[:1]", "format": "messages",
    "fields": {"text": "body"}, "roles": {"user": ("me",)}, "template": "{a}", "template_without_input": "{b}",
    "text_mode": "file", "weight": 2.0, "max_samples": 3, "mix": ({"path": "b"},), "evaluation": {"path": "b"},
    "val_split": 0.1, "on_bad_record": "skip", "max_length": 32, "too_long": "drop", "packing": True,
    "train_on": ("all",), "thinking": "strip", "system_prompt": "s",
    "chat_template": "{{ 'x' }}", "chat_template_kwargs": {"message": 1},
    "streaming": True, "min_pixels": 3136, "max_pixels": 802816,
}  # fmt: skip
# These change the order or the speed of training only; a stream's blocks depend on the order, too.
NEUTRAL = {"workers": 2, "cache_dir": "elsewhere", "batching": "tokens", "shuffle": False}


def test_every_setting_that_changes_the_content_changes_the_name(tokenizer: PreTrainedTokenizerBase) -> None:
    assert {*CHANGES, *NEUTRAL} == set(DatasetSection.model_fields)

    def name(**changes: Any) -> str:
        section = DatasetSection.model_validate({"path": "a.jsonl", "max_length": 64} | changes)
        encoder = DocumentEncoder(tokenizer, section)
        return digest_json(prepare_module._identify_data(section, encoder, [], 0))

    names = {key: name(**{key: value}) for key, value in CHANGES.items()}
    assert len({name(), *names.values()}) == 1 + len(CHANGES)
    assert {name(**{key: value}) for key, value in NEUTRAL.items()} == {name()}


def test_images_of_another_working_folder_are_other_images(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = DatasetSection(path="chats.jsonl", max_length=64)
    encoder, found = DocumentEncoder(tokenizer, section), dict[bool, list[Any]]()
    for has_images in (False, True):
        encoder.images = SimpleNamespace(settings_digest="x") if has_images else None  # type: ignore[assignment]
        for name in ("a", "b"):
            (tmp_path / name).mkdir(exist_ok=True)
            monkeypatch.chdir(tmp_path / name)
            write_chats(Path("chats.jsonl"), 4)
            identity = prepare_module._identify_data(section, encoder, [("dataset", section)], 0)
            found.setdefault(has_images, []).append(identity)
    assert found[False][0] == found[False][1] and found[True][0] != found[True][1]


def test_a_file_name_in_another_encoding_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    Path("data").mkdir()
    os.rename(write_chats(Path("chats.jsonl"), 4), b"data/b\xe9.jsonl")
    section = DatasetSection(path="data", max_length=64)
    with pytest.raises(UserError, match=r"dataset.path=data: the file name 'b\\udce9.jsonl' is not UTF-8; rename it"):
        prepare_data(section, tokenizer, seed=0, cache_dir=Path("cache"), model_max_length=None)
