"""Resuming from a checkpoint: only the same run, only from complete files, without losing an earlier run."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.runs_in_process import make_ground, train
from tests.tiny import make_model, write_chats
from trainer.checkpoint.checkpoint import Position
from trainer.checkpoint.checkpoint_files import describe_damage, list_checkpoints, reseal
from trainer.checkpoint.checkpoint_manager import CheckpointManager
from trainer.checkpoint.finished_run import find_run
from trainer.commands.estimate import main as estimate
from trainer.commands.inspect import main as inspect
from trainer.commands.prepare_run import main as prepare
from trainer.commands.validate import main as validate
from trainer.config import UserError
from trainer.monitor.metrics import read_metrics


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with checkpoints at 2 and 4, next to other models and data."""
    folder = make_ground(tmp_path_factory.mktemp("resume"))
    train(folder)
    make_model(folder / "other", seed=9)
    make_model(folder / "wide", hidden=128)
    write_chats(folder / "other.jsonl", 40, seed=5)
    return folder


@pytest.fixture
def run_dir(ground: Path) -> Iterator[Path]:
    """The run as it was left, whatever the test does to it."""
    kept = ground / "kept"
    shutil.copytree(ground / "run", kept, dirs_exist_ok=True)
    yield ground / "run"
    shutil.rmtree(ground / "run")
    kept.rename(ground / "run")


def refusal(ground: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> list[str]:
    """Return the errors with which `zerolora prepare` refuses to resume; nothing is written then."""
    before = {path: path.stat().st_mtime_ns for path in (ground / "run").rglob("*")}
    capsys.readouterr()
    code = prepare([str(ground / "base.yaml"), "training.resume_from_checkpoint=latest", *overrides])
    said = capsys.readouterr()
    assert code == 2, said
    assert {path: path.stat().st_mtime_ns for path in (ground / "run").rglob("*")} == before
    lines = said.err.splitlines()
    assert all(line.startswith("error: ") for line in lines)
    return [line.removeprefix("error: ") for line in lines]


ALLOW = "restore it, or allow the change with training.resume_changes: [{}]"
NEW_RUN = "which its optimizer state requires; restore it, or start a new run with lora.adapter_path: "
CHANGES = [
    ("lora.alpha=16", "lora.alpha=16.0: checkpoint-4 was trained with 8.0", ALLOW.format("adapter")),
    ("lora.dropout=0.1", "lora.dropout=0.1: checkpoint-4 was trained with 0.0", ALLOW.format("adapter")),
    ("lora.rslora=true", "lora.rslora=true: checkpoint-4 was trained with false", ALLOW.format("adapter")),
    ("adapter=qlora", "adapter=qlora: checkpoint-4 was trained with lora", ALLOW.format("adapter")),
    ("adapter=none", "adapter=none: checkpoint-4 was trained with lora", NEW_RUN),
    ("lora.r=8", "lora.r=8: checkpoint-4 was trained with 4", NEW_RUN),
    ("lora.target_modules=q_proj", "lora.target_modules=[q_proj]: checkpoint-4 was trained with [all-linear]", NEW_RUN),
    ("lora.exclude_modules=[q_proj]", "lora.exclude_modules=[q_proj]: checkpoint-4 was trained with []", NEW_RUN),
    ("lora.dora=true", "lora.dora=true: checkpoint-4 was trained with false", NEW_RUN),
    ("lora.modules_to_save=[lm_head]", "lora.modules_to_save=[lm_head]: checkpoint-4", NEW_RUN),
    ("lora.init=pissa", "lora.init=pissa: checkpoint-4 was trained with default", NEW_RUN),
    ("seed=7", "seed=7: checkpoint-4 was trained with 42", ALLOW.format("seed")),
    ("training.optimizer=adamw_8bit", "training.optimizer=adamw_8bit: checkpoint-4", ALLOW.format("optimizer")),
    ("dataset.max_length=64", "dataset.max_length=64: checkpoint-4 was trained with 96", ALLOW.format("data")),
    ("dataset.packing=true", "dataset.packing=true: checkpoint-4 was trained with false", ALLOW.format("data")),
    ("dataset.shuffle=false", "dataset.shuffle=false: checkpoint-4 was trained with true", ALLOW.format("data")),
    ("dataset.train_on=all", "dataset.train_on=[all]: checkpoint-4 was trained with [assistant]", ALLOW.format("data")),
    ("scu.enabled=true scu.target=0.01", "scu.enabled=true: checkpoint-4 was trained with false", ALLOW.format("scu")),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "expected", "fix"), CHANGES, ids=[change[0] for change in CHANGES])
def test_what_changes_the_run_is_refused(
    ground: Path, capsys: pytest.CaptureFixture[str], changes: str, expected: str, fix: str
) -> None:
    lines = refusal(ground, capsys, *changes.split(" "))
    assert len(lines) == 1 and lines[0].startswith(expected) and fix in lines[0], lines


def test_all_of_it_is_refused_at_once(ground: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of the same shapes, data of another file, the seed, the batch over all ranks."""
    changes = [f"base_model={ground}/other", f"dataset.path={ground}/other.jsonl", "seed=7", "--world-size=2"]
    lines = refusal(ground, capsys, *changes)
    assert [line.split(":")[0] for line in lines] == [
        "seed=7",
        f"base_model={ground}/other",
        f"dataset.path={ground}/other.jsonl",
        "training.batch_size=4 x gradient_accumulation_steps=1 x 2 ranks = 8 samples per step",
    ]
    assert "its weight files differ from" in lines[1] and "[base_model]" in lines[1]
    assert "not the data that checkpoint-4 was trained with" in lines[2] and "[data]" in lines[2]
    assert "trained with 4" in lines[3] and "[batch]" in lines[3]
    lines = refusal(ground, capsys, *changes, "training.resume_changes=[seed, data, base_model]")
    assert len(lines) == 1 and "[batch]" in lines[0]


def test_validate_says_the_same(ground: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = [str(ground / "base.yaml"), "training.resume_from_checkpoint=latest", "--ranks", "1"]
    assert validate([*config, "seed=7"]) == 2
    assert "error: seed=7: checkpoint-4 was trained with 42" in capsys.readouterr().err
    assert validate([*config, "training.max_steps=9", "training.learning_rate=1e-4", "zero.stage=1"]) == 0
    out = capsys.readouterr().out
    assert f"resume: from {ground}/run/checkpoint-4" in out
    changed = "training.max_steps 4 -> 9, training.learning_rate 0.001 -> 0.0001, zero.stage 2 -> 1"
    assert f"resume: changed since checkpoint-4: {changed}" in out
    assert validate(config) == 0
    assert "nothing is left to train; raise max_steps or epochs" in capsys.readouterr().out


def test_validate_compares_the_ranks_that_train_would_start(
    ground: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # two ranks
    assert validate([str(ground / "base.yaml"), "training.resume_from_checkpoint=latest"]) == 2
    assert "2 ranks = 8 samples per step: checkpoint-4 was trained with 4" in capsys.readouterr().err


def test_the_same_run_under_other_names_is_the_same(
    ground: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Model and data in another place, targets in another order of words, half the batch on twice the ranks."""
    shutil.copytree(ground / "model", tmp_path / "moved")
    shutil.copy(ground / "train.jsonl", tmp_path / "moved.jsonl")
    moved = [f"base_model={tmp_path}/moved", f"dataset.path={tmp_path}/moved.jsonl", "training.batch_size=2"]
    config = [str(ground / "base.yaml"), "training.resume_from_checkpoint=latest", "training.max_steps=9"]
    assert prepare([*config, *moved, "--world-size=2"]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "changed since checkpoint-4: training.max_steps 4 -> 9, ranks 1 -> 2" in out


@pytest.mark.parametrize("size", [8, "auto"])
def test_a_global_batch_is_the_same_before_the_ranks_divide_it(
    ground: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int | str
) -> None:
    """8 in micro-batches of 4, and `auto`, which comes to 1: what the ranks recorded is what the start compares."""
    train(ground, output_dir=str(tmp_path / "run"), training__global_batch_size=size)
    config = [str(ground / "base.yaml"), f"output_dir={tmp_path}/run", "training.resume_from_checkpoint=latest"]
    goes_on = [*config, f"training.global_batch_size={size}", "training.max_steps=9"]
    assert prepare([*goes_on, "--world-size=1"]) == 0, capsys.readouterr().err
    assert "changed since checkpoint-4: training.max_steps 4 -> 9\n" in capsys.readouterr().out
    assert prepare([*goes_on, "training.global_batch_size=2", "--world-size=2"]) == 2
    trained_with = 8 if size == 8 else 1
    expected = f"= 2 samples per step: checkpoint-4 was trained with {trained_with} (training.global_batch_size: "
    assert expected in capsys.readouterr().err


def test_a_change_that_is_allowed_is_made(run_dir: Path, ground: Path) -> None:
    """Other weights and another seed; the ranks ask once more, and say what has changed."""
    again = {
        "training__resume_from_checkpoint": "latest",
        "training__max_steps": 5,
        "base_model": str(ground / "other"),
    }
    with pytest.raises(UserError, match=r"seed=7: .*\nerror: base_model=.*weight files differ from"):
        train(ground, seed=7, **again)
    shown = train(ground, seed=7, training__resume_changes=["seed", "base_model"], **again)
    assert "seed 42 -> 7" in shown and "the weights of base_model" in shown and "resumed from" in shown
    state = json.loads((run_dir / "checkpoint-5" / "state.json").read_text())
    assert state["run"]["settings"]["seed"] == 7


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lora__r": 8}, "has shape [4, 64], not [8, 64], so it was saved with another model, adapter or optimizer"),
        (
            {"lora__target_modules": ["q_proj"]},
            "it has 24 more trained tensors than this run, so it was saved with another",
        ),
        ({"base_model": "wide"}, "], so it was saved with another model, adapter or optimizer"),
    ],
)
def test_an_older_one_of_another_model_or_adapter_is_one_line(
    run_dir: Path, ground: Path, changes: dict[str, Any], expected: str
) -> None:
    folder = run_dir / "checkpoint-4"
    state = json.loads((folder / "state.json").read_text())
    del state["run"]
    (folder / "state.json").write_text(json.dumps(state))
    reseal(folder, "state.json")
    if "base_model" in changes:
        changes = {"base_model": str(ground / "wide")}
    metrics = (run_dir / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError) as refused:
        train(ground, training__resume_from_checkpoint="latest", training__max_steps=5, **changes)
    assert expected in str(refused.value) and "\n" not in str(refused.value)
    assert (run_dir / "metrics.jsonl").read_bytes() == metrics


def test_a_damaged_newest_one_is_passed_over_in_training(run_dir: Path, ground: Path) -> None:
    """The run resumes from the previous one and is bitwise equal to an undamaged run."""
    whole = load_file(run_dir / "adapter_model.safetensors")
    file = run_dir / "checkpoint-4" / "training_state-00000.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    shown = train(ground, training__resume_from_checkpoint="latest")
    assert "warning: skipped checkpoint-4 (training_state-00000.safetensors is damaged: it has 5,000 of" in shown
    assert "resuming from checkpoint-2" in shown and "resumed from" in shown
    assert [path.name for path in list_checkpoints(run_dir)] == ["checkpoint-2", "checkpoint-4"]
    assert describe_damage(run_dir / "checkpoint-4") is None and (run_dir / "abandoned-checkpoint-4").is_dir()
    for name, value in load_file(run_dir / "adapter_model.safetensors").items():
        assert torch.equal(value, whole[name]), name


def test_an_earlier_checkpoint_leaves_the_later_course_aside(
    run_dir: Path, ground: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As 500, 1000, 1500, on from 500 to 800: here 2, 4, on from 2 to 3. A start that fails costs no checkpoint."""

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    again = {"training__resume_from_checkpoint": str(run_dir / "checkpoint-2")}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(CheckpointManager, "save", killed)
        train(ground, **again, training__max_steps=5, training__save_steps=0)
    assert [path.name for path in list_checkpoints(run_dir)] == ["checkpoint-2", "checkpoint-4"]
    assert [record["step"] for record in read_metrics(run_dir)] == [1, 2, 3, 4, 5]
    shown = train(ground, **again, training__max_steps=3)
    expected = "checkpoints after step 2 belong to the earlier run and were renamed: abandoned-checkpoint-4"
    assert shown.count(expected) == 1
    assert [path.name for path in list_checkpoints(run_dir)] == ["checkpoint-2", "checkpoint-3"]
    assert describe_damage(run_dir / "abandoned-checkpoint-4") is None
    assert [record["step"] for record in read_metrics(run_dir)] == [1, 2, 3]


def test_the_best_checkpoint_is_that_of_the_course(ground: Path, tmp_path: Path) -> None:
    """On from step 2 after the best so far, of step 1, was pruned for a better one that is left behind."""
    settings = {
        "output_dir": str(tmp_path / "best"),
        "dataset__evaluation": {"path": str(ground / "held_out.jsonl")},
        "training__eval_steps": 1,
        "training__save_steps": 1,
        "training__best_checkpoint": True,
    }
    train(ground, **settings, training__max_steps=4)
    run_dir = tmp_path / "best"
    best = json.loads((run_dir / "checkpoint-2" / "state.json").read_text())["best_step"]
    assert best in (1, 2)
    shutil.rmtree(run_dir / "checkpoint-1", ignore_errors=True)
    state = json.loads((run_dir / "checkpoint-2" / "state.json").read_text()) | {"best_step": 1, "best_loss": 0.1}
    (run_dir / "checkpoint-2" / "state.json").write_text(json.dumps(state))
    reseal(run_dir / "checkpoint-2", "state.json")
    again = {"training__resume_from_checkpoint": str(run_dir / "checkpoint-2"), "training__max_steps": 3}
    shown = train(ground, **settings, **again)
    assert (
        "note: the best checkpoint so far (step 1) is missing; the search for the best checkpoint starts over" in shown
    )
    assert json.loads((run_dir / "checkpoint-3" / "state.json").read_text())["best_step"] == 3
    assert re.search(r"^held-out loss \d\.\d{4} -> \d\.\d{4}", shown, re.MULTILINE), "of all steps"


def test_the_last_weights_are_kept_if_they_are_the_best(ground: Path, tmp_path: Path) -> None:
    """Step 5 is no multiple of eval_steps; every step of this run is better than the one before."""
    shown = train(
        ground,
        output_dir=str(tmp_path / "last"),
        dataset__evaluation={"path": str(ground / "held_out.jsonl")},
        training__max_steps=5,
        training__eval_steps=2,
        training__save_steps=2,
        training__best_checkpoint=True,
    )
    losses: dict[Any, Any] = {
        record["step"]: record["eval/loss"] for record in read_metrics(tmp_path / "last") if "eval/loss" in record
    }
    assert list(losses) == [0, 2, 4, 5] and losses[5] == min(losses.values())
    assert "keeping the weights of step" not in shown
    last, result = (tmp_path / "last" / part / "adapter_model.safetensors" for part in ("checkpoint-5", ""))
    assert last.read_bytes() == result.read_bytes()


def test_a_full_disk_ends_no_training_and_costs_no_checkpoint(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's own refusal of large files stands for the disk; it comes when the second checkpoint is written."""
    import resource

    run_dir = tmp_path / "full"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    save = CheckpointManager.save

    def refuse(checkpoints: CheckpointManager, engine: Any, position: Position, *more: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 if position.step == 2 else soft, hard))
        try:
            save(checkpoints, engine, position, *more)
            checkpoints.wait_for_save(60.0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(CheckpointManager, "save", refuse)
    shown = train(ground, output_dir=str(run_dir), training__save_steps=1, training__max_steps=3)
    assert "warning: checkpoint-2 was not saved: File too large (the disk at /" in shown and "GiB free)" in shown
    assert [path.name for path in list_checkpoints(run_dir)] == ["checkpoint-1", "checkpoint-3"]
    assert not list(run_dir.glob(".writing-*"))
    card = (run_dir / "README.md").read_text()
    assert "A LoRA adapter for" in card and "| seed |" in card and "More Information Needed" not in card
    assert str(tmp_path) not in card and str(ground) not in card
    assert not (run_dir / "checkpoint-3" / "README.md").exists()
    with pytest.raises(UserError, match="checkpoint-2 was not saved") as failed:
        train(ground, output_dir=str(tmp_path / "end"), training__save_steps=1, training__max_steps=2)
    assert failed.value.exit_code == 1
    assert [describe_damage(path) for path in list_checkpoints(tmp_path / "end")] == [None]


def test_checkpoints_by_minutes_and_by_steps(ground: Path, tmp_path: Path) -> None:
    """A millisecond is over after every step; the last one is made anyway."""
    settings = {"training__save_steps": 0, "training__max_steps": 3, "training__save_total_limit": None}
    train(ground, output_dir=str(tmp_path / "often"), training__save_minutes=1e-6, **settings)
    assert [path.name for path in list_checkpoints(tmp_path / "often")] == [f"checkpoint-{step}" for step in (1, 2, 3)]
    assert [bool(record.get("perf/save_ms")) for record in read_metrics(tmp_path / "often")][1:3] == [True, True]
    train(ground, output_dir=str(tmp_path / "seldom"), training__save_minutes=60, **settings)
    assert [path.name for path in list_checkpoints(tmp_path / "seldom")] == ["checkpoint-3"]


def test_moments_of_8_bits_keep_their_bytes_at_the_same_stage(ground: Path, tmp_path: Path) -> None:
    """Elsewhere they are quantized again, and the run says so."""
    settings = {"training__optimizer": "adamw_8bit", "lora__r": 32, "training__max_steps": 3, "training__save_steps": 1}
    train(ground, **settings, output_dir=str(tmp_path / "whole"))
    whole = load_file(tmp_path / "whole" / "adapter_model.safetensors")
    start = {"training__resume_from_checkpoint": str(tmp_path / "whole" / "checkpoint-2")}
    shown = train(ground, **settings, **start, output_dir=str(tmp_path / "same"))
    assert "quantized again" not in shown
    for name, value in load_file(tmp_path / "same" / "adapter_model.safetensors").items():
        assert torch.equal(value, whole[name]), name
    changes: dict[str, dict[str, Any]] = {"stage": {"zero__stage": 0}, "other": {"ops__flat": False}}
    for name, change in changes.items():
        shown = train(ground, **settings, **start, output_dir=str(tmp_path / name), **change)
        assert "note: the 8-bit moments are partitioned differently" in shown
        moved = load_file(tmp_path / name / "adapter_model.safetensors")
        assert 0 < max(float((moved[key] - value).abs().max()) for key, value in whole.items()) < 1e-3


def test_another_optimizer_needs_state_that_the_checkpoint_has(ground: Path, tmp_path: Path) -> None:
    """Lion continues with a moment of AdamW; Muon's was never kept."""
    start = {
        "training__resume_from_checkpoint": str(ground / "run" / "checkpoint-2"),
        "training__resume_changes": ["optimizer"],
        "zero__stage": 0,
    }
    with pytest.raises(UserError, match="it has no optimizer state momentum_buffer, which"):
        train(ground, **start, training__optimizer="muon", output_dir=str(tmp_path / "muon"))
    train(ground, **start, training__optimizer="lion", output_dir=str(tmp_path / "lion"))
    assert (tmp_path / "lion" / "checkpoint-4").is_dir()


def test_pissa_resumes_in_another_folder(ground: Path, tmp_path: Path) -> None:
    """The start of its adapter, which what it saves is the difference to, comes along."""
    settings = {"lora__init": "pissa", "training__max_steps": 3, "training__save_steps": 1}
    train(ground, **settings, output_dir=str(tmp_path / "whole"))
    start = {"training__resume_from_checkpoint": str(tmp_path / "whole" / "checkpoint-2")}
    train(ground, **settings, **start, output_dir=str(tmp_path / "moved"))
    whole = load_file(tmp_path / "whole" / "adapter_model.safetensors")
    for name, value in load_file(tmp_path / "moved" / "adapter_model.safetensors").items():
        assert torch.equal(value, whole[name]), name
    shutil.rmtree(tmp_path / "whole" / "initial_adapter")
    with pytest.raises(UserError, match="whole/initial_adapter: is missing, but the run cannot continue without it"):
        train(ground, **settings, **start, output_dir=str(tmp_path / "lost"))


def test_a_folder_that_is_moved_in_training_leaves_whole_runs(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints that follow lie in a new folder, with a record by which they can be used and resumed."""
    run, save = tmp_path / "run", CheckpointManager.save

    def move_and_save(checkpoints: CheckpointManager, *arguments: Any) -> None:
        if (run / "checkpoint-2").exists():
            run.rename(tmp_path / "moved")
        save(checkpoints, *arguments)

    monkeypatch.setattr(CheckpointManager, "save", move_and_save)
    train(ground, output_dir=str(run))
    for name in ("moved/checkpoint-2", "run/checkpoint-4", "run"):
        assert find_run(tmp_path / name).config.output_dir == str(run)
    shown = train(ground, output_dir=str(run), training__resume_from_checkpoint="latest", training__max_steps=5)
    assert "resumed from" in shown and find_run(run / "checkpoint-5")
    moved = str(tmp_path / "moved" / "checkpoint-2")
    train(ground, output_dir=str(tmp_path / "third"), training__resume_from_checkpoint=moved)
    assert find_run(tmp_path / "third" / "checkpoint-4")


def test_the_default_length_is_the_context_of_a_shorter_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is recorded, estimated with, and the same when the run is resumed."""
    file = make_ground(tmp_path) / "base.yaml"
    settings = yaml.safe_load(file.read_text())
    del settings["dataset"]["max_length"]
    file.write_text(yaml.safe_dump(settings))
    assert "dataset.max_length: 256, the model's context length" in train(tmp_path)
    assert json.loads((tmp_path / "run" / "training_config.json").read_text())["dataset"]["max_length"] == 256
    resumed = [str(file), "training.resume_from_checkpoint=latest", "training.max_steps=6", "--ranks", "1"]
    assert validate(resumed) == 0
    said = capsys.readouterr().out
    assert "dataset.max_length: 256, the model's context length" in said and "checkpoint-4" in said
    assert "resumed from" in train(tmp_path, training__resume_from_checkpoint="latest", training__max_steps=6)
    assert estimate([str(file)]) == 0 and inspect([str(file), "--examples", "1"]) == 0
    assert "2,048" not in capsys.readouterr().out
