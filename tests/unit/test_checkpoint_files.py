"""Choose the checkpoint to resume from: any damage is found and named, and publishing never harms older checkpoints."""

import json
import os
import pickle
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer.checkpoint import checkpoint_files
from trainer.checkpoint.adapter_files import describe_adapter_damage
from trainer.checkpoint.checkpoint_files import (
    choose_checkpoint,
    describe_damage,
    list_checkpoints,
    list_later_checkpoints,
    list_surplus_checkpoints,
    publish,
    reseal,
)
from trainer.checkpoint.tensor_writer import write_tensors
from trainer.config import UserError


def write(run_dir: Path, step: int, *, name: str = "") -> Path:
    """Write a checkpoint of small files."""
    folder = run_dir / (name or f"checkpoint-{step}")
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    (folder / "README.md").write_text("a card")
    (folder / "empty.txt").touch()
    for file in ("adapter_model", "training_state", "rank-00000"):
        save_file({"w": torch.arange(64.0) + step}, folder / f"{file}.safetensors")
    (folder / "state.json").write_text(json.dumps({"format": 3, "step": step}))
    checkpoint_files.seal(folder)
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for step in (5, 10, 15):
        write(tmp_path / "run", step)
    return tmp_path / "run"


def flip(file: Path, byte: int, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[byte] ^= 1 << bit
    file.write_bytes(content)


def test_one_flipped_bit_in_any_file_is_found_and_named(run_dir: Path) -> None:
    """Every bit of the small files, COMPLETE and state.json among them; two hundred of the others."""
    checkpoint, draw = run_dir / "checkpoint-15", random.Random(0)
    assert describe_damage(checkpoint) is None
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size]
    assert len(files) == 8
    for file in files:
        whole = file.read_bytes()
        bits = [(byte, bit) for byte in range(len(whole)) for bit in range(8)]
        for byte, bit in bits if len(bits) < 400 else draw.sample(bits, 200):
            flip(file, byte, bit)
            found = describe_damage(checkpoint)
            assert found is not None and found.startswith(str(file.relative_to(checkpoint))), (file, byte, bit, found)
            file.write_bytes(whole)
    assert describe_damage(checkpoint) is None


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("training_state.safetensors", "cut", "training_state.safetensors is "),
        ("rank-00000.safetensors", "pickle", "rank-00000.safetensors is "),
        ("state.json", "cut", "state.json is "),
        ("state.json", "key", "state.json "),
        ("training_state.safetensors", "gone", "training_state.safetensors is missing"),
        ("COMPLETE", "gone", "is incomplete"),
    ],
)
def test_latest_skips_a_damaged_checkpoint_with_a_warning(run_dir: Path, name: str, change: str, problem: str) -> None:
    file = run_dir / "checkpoint-15" / name
    if change == "cut":
        file.write_bytes(file.read_bytes()[:-7])
    elif change == "pickle":
        file.write_bytes(pickle.dumps({"w": [1.0] * 100}))
    elif change == "key":
        file.write_text(json.dumps({"format": 2, "step": 15}))
    else:
        file.unlink()
    for setting in ("latest", "auto"):
        found = choose_checkpoint(setting, run_dir, verify=True)
        assert found.checkpoint == run_dir / "checkpoint-10"
        assert found.warning is not None and "\n" not in found.warning
        assert f"checkpoint-15 ({problem}" in found.warning and "resuming from checkpoint-10" in found.warning
    with pytest.raises(UserError) as refused:
        choose_checkpoint(str(run_dir / "checkpoint-15"), run_dir, verify=True)
    line = str(refused.value)
    assert line.startswith(f"training.resume_from_checkpoint={run_dir}/checkpoint-15: {problem}") and "\n" not in line
    assert "or latest for the newest complete checkpoint" in line


def test_all_damaged_checkpoints_are_listed_and_auto_does_not_start_over(run_dir: Path) -> None:
    for step in (10, 15):
        flip(run_dir / f"checkpoint-{step}" / "state.json", 3, 1)
    found = choose_checkpoint("latest", run_dir, verify=True)
    assert found.checkpoint == run_dir / "checkpoint-5"
    assert found.warning is not None and "checkpoint-15 (" in found.warning and "checkpoint-10 (" in found.warning
    flip(run_dir / "checkpoint-5" / "state.json", 3, 1)
    for setting in ("latest", "auto"):
        with pytest.raises(UserError, match=r"no complete checkpoint in .*checkpoint-15 .*checkpoint-5 "):
            choose_checkpoint(setting, run_dir, verify=True)
    assert choose_checkpoint("auto", run_dir.parent / "new", verify=True).checkpoint is None


def test_an_empty_list_of_checksums_is_damage(run_dir: Path) -> None:
    (run_dir / "checkpoint-15" / "COMPLETE").write_bytes(b"")
    assert describe_damage(run_dir / "checkpoint-15") == "COMPLETE is damaged"


def test_a_card_that_push_has_written_is_no_damage(run_dir: Path) -> None:
    checkpoint = run_dir / "checkpoint-15"
    (checkpoint / "README.md").write_text("a better card")
    assert describe_damage(checkpoint) == "README.md is damaged: it has 13 of 6 bytes"
    reseal(checkpoint, "README.md")
    assert describe_damage(checkpoint) is None


def test_what_is_later_steps_aside_and_is_neither_found_nor_pruned(tmp_path: Path) -> None:
    """500, 1000, 1500 on the disk; on from 500 to 800, keeping 3."""
    run_dir = tmp_path / "run"
    for step in (500, 1000, 1500):
        write(run_dir, step)
    write(run_dir, 800, name=".writing-checkpoint-800")
    later = list_later_checkpoints(run_dir, 500)
    aside = publish(run_dir / ".writing-checkpoint-800", run_dir / "checkpoint-800", later)
    assert [path.name for path in aside] == ["abandoned-checkpoint-1000", "abandoned-checkpoint-1500"]
    assert [path.name for path in list_checkpoints(run_dir)] == ["checkpoint-500", "checkpoint-800"]
    assert choose_checkpoint("latest", run_dir, verify=True).checkpoint == run_dir / "checkpoint-800"
    assert list(list_surplus_checkpoints(run_dir, 3, ())) == []
    write(run_dir, 1000, name=".writing-checkpoint-1000")
    publish(run_dir / ".writing-checkpoint-1000", run_dir / "checkpoint-1000", [])
    write(run_dir, 900, name=".writing-checkpoint-900")
    aside = publish(
        run_dir / ".writing-checkpoint-900", run_dir / "checkpoint-900", list_later_checkpoints(run_dir, 800)
    )
    assert [path.name for path in aside] == ["abandoned-2-checkpoint-1000"]
    # What was set aside can still be named.
    found = choose_checkpoint(str(run_dir / "abandoned-checkpoint-1500"), run_dir, verify=True)
    assert describe_damage(found.checkpoint or run_dir) is None


@pytest.mark.parametrize("calls", range(5))
def test_a_crash_while_a_checkpoint_takes_its_place_loses_none(
    tmp_path: Path, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before each rename: the resumed checkpoint exists, and no other checkpoint's data is lost."""
    run_dir, replace = tmp_path / "run", os.replace
    for step in (500, 1000, 1500):
        write(run_dir, step)
    write(run_dir, 1000, name=".writing-checkpoint-1000")
    later, done = list_later_checkpoints(run_dir, 500), 0

    def crash(*names: Path) -> None:
        nonlocal done
        if done == calls:
            raise KeyboardInterrupt
        done += 1
        replace(*names)

    monkeypatch.setattr(os, "replace", crash)
    try:
        publish(run_dir / ".writing-checkpoint-1000", run_dir / "checkpoint-1000", later)
    except KeyboardInterrupt:
        assert calls < 4  # COMPLETE, two aside, the new one
    monkeypatch.undo()
    assert choose_checkpoint("latest", run_dir, verify=True).checkpoint is not None
    assert describe_damage(run_dir / "checkpoint-500") is None
    kept = [path for path in run_dir.glob("*checkpoint-*") if path.name[0] != "." and describe_damage(path) is None]
    assert len(kept) == 3 + (calls == 4)


def test_every_new_folder_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        events.append(f"-> {Path(target).name}")
        replace(source, target)

    run_dir = tmp_path / "runs" / "new"
    folder = write(run_dir, 5, name=".writing-checkpoint-5")
    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    publish(folder, run_dir / "checkpoint-5", [])
    named = events.index("-> checkpoint-5")
    for path in (folder, *(run_dir / "checkpoint-5").rglob("*")):
        assert str(path).replace("/checkpoint-5", "/.writing-checkpoint-5") in events[:named], path
    for above in (run_dir, run_dir.parent, tmp_path):
        assert str(above) in events[named:], above


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("cut", "adapter_model.safetensors is truncated"),
        ("pickle", "adapter_model.safetensors is not a safetensors file"),
        ("torch", "adapter_model.safetensors is not a safetensors file"),
        ("header", "adapter_model.safetensors "),
        ("bit", "adapter_model.safetensors is damaged: its checksum"),
        ("gone", "adapter_model.safetensors is missing"),
        ("config", "adapter_config.json is not JSON"),
    ],
)
def test_a_damaged_adapter_is_named(run_dir: Path, change: str, problem: str) -> None:
    folder = run_dir / "checkpoint-15"
    file = folder / "adapter_model.safetensors"
    assert describe_adapter_damage(folder) is None
    if change == "cut":
        file.write_bytes(file.read_bytes()[:-9])
    elif change == "pickle":
        file.write_bytes(pickle.dumps([0] * 999))
    elif change == "torch":
        torch.save({"w": torch.zeros(3)}, file)
    elif change == "header":
        flip(file, 9, 6)
    elif change == "bit":
        flip(file, -3, 0)
    elif change == "gone":
        file.unlink()
    else:
        (folder / "adapter_config.json").write_text('{"r": ')
    found = describe_adapter_damage(folder)
    assert found is not None and found.startswith(problem)


@pytest.mark.parametrize("pad", range(0, 512, 8))
def test_a_header_of_any_length_is_no_pickle(run_dir: Path, pad: int) -> None:
    """One length in 32 begins with 0x80, as a pickle does; where one does, no adapter of its layers could be loaded."""
    file = run_dir / "checkpoint-15" / "adapter_model.safetensors"
    for name in ("COMPLETE", "state.json"):  # a folder without training state needs no COMPLETE
        (run_dir / "checkpoint-15" / name).unlink()
    digest = write_tensors(file, {"layer.lora_A.weight": torch.ones(4, 3)}, {"pad": "x" * pad})
    assert digest == checkpoint_files.compute_checksum(file)
    assert describe_adapter_damage(run_dir / "checkpoint-15") is None
    assert {name: value.tolist() for name, value in load_file(file).items()} == {"layer.lora_A.weight": [[1.0] * 3] * 4}
