"""Resuming and evaluating a run with damaged files, and any words behind the commands.

Going on from a checkpoint ends with the very weights of the run that was never stopped, or in a line.
"""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.any_input import or_refused, tries
from tests.runs_in_process import train, train_alone
from tests.unit import test_any_damage as on_disk
from tests.unit.test_any_damage import as_typed, damaged, ends, files_of, harm_to, model_files, run_files
from trainer.checkpoint.run_record import RUN_FILES
from trainer.commands.estimate import main as estimate
from trainer.commands.evaluate import main as evaluate
from trainer.commands.export.__main__ import main as export
from trainer.commands.inspect import main as inspect
from trainer.commands.merge import main as merge
from trainer.commands.validate import main as validate
from trainer.monitor.report.__main__ import main as report

Harm = list[tuple[str, int, str]]
ground = on_disk.ground
OF_TRAINING = ("run", "cache", "console.txt")
"""What a run of the ground may write."""
harm_to_run = harm_to(run_files | on_disk.checkpoint_files)
harm_to_base = harm_to(run_files | model_files)


def check_resumed(ground: Path, harm: Harm, checkpoint: str) -> None:
    wanted = load_file(ground.parent / "whole" / "run" / "adapter_model.safetensors")
    setting = str(ground / "run" / checkpoint) if checkpoint.startswith("checkpoint") else checkpoint
    held_out = {"path": str(ground / "held_out.jsonl")}
    with damaged(ground, harm):
        before = files_of(ground, but=OF_TRAINING)
        shown = or_refused(
            lambda: train(ground, training__resume_from_checkpoint=setting, dataset__evaluation=held_out)
        )
        assert files_of(ground, but=OF_TRAINING) == before
        if shown is not None:
            got = load_file(ground / "run" / "adapter_model.safetensors")
            assert got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)


@example([("run/checkpoint-2/rank-00000.safetensors", 700, "flip")], "checkpoint-2")
@example([("run/checkpoint-4/adapter_model.safetensors", 1, "gone")], "latest")
@given(harm_to_run, st.sampled_from(["checkpoint-2", "latest"]))
@tries(2)
def test_a_resumed_run_ends_as_the_run_that_it_resumes(ground: Path, harm: Harm, checkpoint: str) -> None:
    check_resumed(ground, harm, checkpoint)


@pytest.mark.nightly
@given(harm_to_run, st.sampled_from(["checkpoint-2", "latest", "auto"]))
@tries(60)
def test_many_resumed_runs(ground: Path, harm: Harm, checkpoint: str) -> None:
    check_resumed(ground, harm, checkpoint)


OWN = ("run/notes.txt", "run/plots.csv", "project/adapter_utils.py", "project/plots/mine.png", "project/README.md")
"""Files that no run has written, next to some that one has, and under names that runs use."""
folders = st.sampled_from(["run", "project", "model", "", "run/checkpoint-2", "new"])


def check_left_alone(ground: Path, folder: str, overwrite: object, resume: str | None) -> None:
    with damaged(ground, []):
        for name in OWN:
            (ground / name).parent.mkdir(parents=True, exist_ok=True)
            (ground / name).write_text(f"mine: {name}")
        recorded = json.loads((ground / "run" / "run.json").read_text())["checksums"]
        ours = {f"run/{name}" for name in (*RUN_FILES, "checkpoint-2", "checkpoint-4", "README.md", *recorded)}
        others = [name for name in files_of(ground, but=("cache", "console.txt")) if not _is_below(name, ours)]
        before = {name: (ground / name).read_bytes() for name in others}
        settings = {"output_dir": str(ground / folder), "output__overwrite": overwrite, "training__max_steps": 1}
        held_out = {"path": str(ground / "held_out.jsonl")}
        settings |= {"training__resume_from_checkpoint": resume, "dataset__evaluation": held_out}
        or_refused(lambda: train_alone(ground, **settings))
        for name, content in before.items():
            places = [ground / name, ground / name.replace("run/", "run.1/", 1)]  # an earlier run is moved aside whole
            assert content in [place.read_bytes() for place in places if place.is_file()], name


def _is_below(name: str, ours: set[str]) -> bool:
    parts = name.split("/")
    return any("/".join(parts[:depth]) in ours for depth in range(1, len(parts) + 1)) or name.startswith("run/logs/")


@example("model", "delete", None)
@example("", "delete", "auto")
@example("run", "delete", None)
@example("run", True, None)
@example("project", True, "auto")
@given(folders, st.sampled_from([False, True, "delete"]), st.sampled_from([None, "latest", "auto"]))
@tries(2)
def test_no_file_is_touched_that_no_run_has_written(
    ground: Path, folder: str, overwrite: object, resume: str | None
) -> None:
    check_left_alone(ground, folder, overwrite, resume)


@pytest.mark.slow
@given(folders, st.sampled_from([False, True, "delete"]), st.sampled_from([None, "latest", "auto"]))
@tries(25)
def test_no_file_is_touched_in_many_folders(ground: Path, folder: str, overwrite: object, resume: str | None) -> None:
    check_left_alone(ground, folder, overwrite, resume)


def check_can_evaluate(ground: Path, harm: Harm) -> None:
    with damaged(ground, harm):
        before = files_of(ground, but=("cache",))
        ends(lambda: evaluate([str(ground / "run"), "--samples", "5"]))
        assert files_of(ground, but=("cache",)) == before


@given(harm_to_base)
@tries(3)
def test_evaluation_of_a_damaged_run(ground: Path, harm: Harm) -> None:
    check_can_evaluate(ground, harm)


@pytest.mark.slow
@given(harm_to_base)
@tries(60)
def test_many_evaluations_of_damaged_runs(ground: Path, harm: Harm) -> None:
    check_can_evaluate(ground, harm)


words = st.sampled_from(
    ["{run}", "{run}/checkpoint-2", "{config}", "{config}", "--json", "--output", "--format", "gguf", "--dtype", "bf16",
     "--gpus", "0", "-1", "2", "--gpu-memory", "80GB", "lots", "--examples", "--samples", "--help", "--batch-size",
     "lora.r=4", "--data", "training.epochs=3", "--training.epochs=3", "training.batch_size=auto", "zero.stage=3",
     "zero.stage=auto", "", "--", "-", "x", "é", "output_dir={run}", "output_dir={model}", "output_dir=/", "{model}",
     "output.overwrite=true", "output.overwrite=delete", "training.resume_from_checkpoint=latest", "base_model={run}",
     "base_model=/", "{run}/none", "dataset.path={run}", "dataset.path={model}", "dataset.cache_dir={config}",
     "lora.adapter_path={run}", "model.tokenizer=/", "--schema", "3" * 400, "x" * 2_000]
)  # fmt: skip
MODULES: dict[str, Callable[[list[str]], int]] = {
    "validate": validate, "estimate": estimate, "inspect": inspect, "eval": evaluate, "merge": merge,
    "export": export, "report": report,
}  # fmt: skip
commands = st.sampled_from([*MODULES, "status", "config"])
first_words = st.sampled_from(["{run}", "{config}", None])


def check_words(ground: Path, here: Path, command: str, first: str | None, arguments: list[str]) -> None:
    names = {"{run}": ground / "run", "{config}": ground / "base.yaml", "{model}": ground / "model"}
    typed = [first, *arguments] if first else arguments
    for mark, path in names.items():
        typed = [word.replace(mark, str(path)) for word in typed]
    with contextlib.chdir(here), damaged(ground, []):
        outputs = ("run/merged", "run/export", "run/report.html", "cache")
        before = files_of(ground, but=outputs)
        ends((lambda: MODULES[command](typed)) if command in MODULES else as_typed(command, *typed))
        assert files_of(ground, but=outputs) == before


@given(commands, first_words, st.lists(words, max_size=4))
@tries(25)
def test_any_words_behind_a_command(
    ground: Path, tmp_path_factory: pytest.TempPathFactory, command: str, first: str | None, arguments: list[str]
) -> None:
    check_words(ground, tmp_path_factory.mktemp("here"), command, first, arguments)


@pytest.mark.nightly
@given(commands, first_words, st.lists(words, max_size=4))
@tries(400)
def test_many_words_behind_a_command(
    ground: Path, tmp_path_factory: pytest.TempPathFactory, command: str, first: str | None, arguments: list[str]
) -> None:
    check_words(ground, tmp_path_factory.mktemp("here"), command, first, arguments)
