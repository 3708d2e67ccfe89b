"""`zerolora compare` from the command line: real runs of a tiny model, with the numbers of `train`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compare.measured_run import DOCUMENTS_FILE
from tests.tiny import make_model, write_chats

CHECKOUT = Path(__file__).parents[2]
OPTIONS = ("--seeds", "1", "--controllers", "none,pi", "--parallel", "2")
NAMES = ("none-seed42", "delta-pi-seed42")

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    make_model(folder / "model")
    write_chats(folder / "train.jsonl", 24)
    write_chats(folder / "eval.jsonl", 11, seed=9)
    (folder / "c.yaml").write_text(f"""
base_model: {folder}/model
output_dir: {folder}/runs
lora: {{r: 4}}
dataset: {{path: {folder}/train.jsonl, max_length: 128, cache_dir: {folder}/cache}}
training: {{max_steps: 6, batch_size: 4, learning_rate: 1e-2, eval_steps: 3, eval_batch_size: 4}}
zero: {{stage: 0}}
scu: {{sigma: 0.1, target: 0.02}}
""")
    tree = f"dataset.evaluation.path={folder}/eval.jsonl"
    assert python("launcher.cli", "compare", f"{folder}/c.yaml", tree, *OPTIONS).returncode == 0
    return folder


def python(module: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=500)


def again(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    evaluation = f"dataset.evaluation.path={folder}/eval.jsonl"
    return python("launcher.cli", "compare", f"{folder}/c.yaml", evaluation, *OPTIONS, *arguments)


def evaluations(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["eval/loss"] for line in lines if "eval/loss" in line]


def test_it_leaves_runs_table_figures_and_plots(folder: Path) -> None:
    names = {path.name for path in (folder / "runs").iterdir()}
    files = {f"compare.{suffix}" for suffix in ("md", "csv", "json")}
    plots = {f"compare_{name}.png" for name in ("bpt", "curves", "scu")}
    assert names == {*NAMES, *files, *plots}
    figures = json.loads((folder / "runs" / "compare.json").read_text())
    assert [row["setting"] for row in figures["settings"]] == ["none", "delta-pi"]
    for name in NAMES:
        written = json.loads((folder / "runs" / name / DOCUMENTS_FILE).read_text())
        assert [entry["step"] for entry in written["evaluations"]] == [0, 3, 6]
        assert len(written["target_tokens"]) == 11
        losses = [sum(entry["loss_sums"]) / sum(written["target_tokens"]) for entry in written["evaluations"]]
        assert losses == pytest.approx(evaluations(folder / "runs" / name), rel=1e-6)


def test_a_trial_trains_and_measures_what_train_does(folder: Path) -> None:
    """The losses summed over documents are those that the trainer sums over batches, after the very same steps."""
    overrides = [f"dataset.evaluation.path={folder}/eval.jsonl", "scu.enabled=true", f"output_dir={folder}/alone"]
    result = python("trainer.train", f"{folder}/c.yaml", *overrides)
    assert result.returncode == 0, result.stdout
    steered = evaluations(folder / "runs" / "delta-pi-seed42")
    assert evaluations(folder / "alone") == pytest.approx(steered, rel=1e-5)
    unsteered = evaluations(folder / "runs" / "none-seed42")
    assert steered[0] == unsteered[0] and steered[-1] != unsteered[-1]


@pytest.mark.nightly
def test_it_continues_with_unfinished_trials(folder: Path) -> None:
    kept, lost = (folder / "runs" / name / DOCUMENTS_FILE for name in NAMES)
    before, content = kept.stat().st_mtime_ns, lost.read_text()
    lost.unlink()
    shown = again(folder).stdout
    assert "2 trials, 1 already finished" in shown and "1/1  delta-pi-seed42" in shown
    assert kept.stat().st_mtime_ns == before
    assert json.loads(lost.read_text()) == json.loads(content)
    shown = again(folder).stdout
    assert "2 trials, 2 already finished" in shown and "final BPT, delta-pi - none" in shown


@pytest.mark.nightly
def test_a_failed_trial_is_reported_and_the_others_are_compared(folder: Path) -> None:
    result = again(folder, "scu.sigma=1e6", "--output", f"{folder}/b")
    assert result.returncode == 1
    assert "FAILED with exit code 2: delta-pi-seed42" in result.stdout and "out of reach" in result.stdout
    assert "final BPT" in result.stdout and "none " in result.stdout
