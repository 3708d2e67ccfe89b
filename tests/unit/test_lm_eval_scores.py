"""Scores of lm-eval's tasks: equal to its command line to the last digit, and one-line errors."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from tests.lm_eval_tasks import write_tasks
from tests.runs_in_process import make_ground, train
from tests.tiny import make_model
from tests.unit.test_after_run import make_run
from trainer.commands import evaluate, merge
from trainer.config import UserError
from trainer.config.evaluation_section import EvaluationSection
from trainer.monitor.metrics import read_metrics
from trainer.parallel.ranks.group import Ranks, assign_batches
from trainer.tasks.lm_eval_scores import TaskEvaluator, load_tasks

NAMES = {
    "choose/acc", "choose/acc_norm", "write/exact_match", "write/chrf",
    "roll/word_perplexity", "roll/bits_per_byte",
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that measured the tasks while it trained; its vocabulary has rows that the tokenizer lacks."""
    return train_scored(make_ground(tmp_path_factory.mktemp("scores")))


def train_scored(folder: Path, **settings: Any) -> Path:
    settings |= {"training__learning_rate": 0.005, "training__max_steps": 6}
    tasks = write_tasks(folder)
    train(folder, evaluation__tasks=tasks, training__eval_steps=2, training__eval_batch_size=3, **settings)
    return folder


def start_lm_eval(folder: Path, model: str, batch_size: int = 3) -> subprocess.CompletedProcess[str]:
    """Run the command `lm_eval run` with the given `--model_args`."""
    command = [
        sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu", "--batch_size", str(batch_size),
        "--model_args", model, "--tasks", ",".join(write_tasks(folder)), "--output_path", str(folder / "lm-eval"),
    ]  # fmt: skip
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def run_lm_eval(folder: Path, *, peft: bool, batch_size: int = 3) -> tuple[dict[str, float], dict[str, float]]:
    """Return the scores and standard errors that the command `lm_eval run` writes."""
    adapter = f",peft={folder / 'run'},tokenizer={folder / 'run'}" if peft else ""
    done = start_lm_eval(folder, f"pretrained={folder / 'model'}{adapter}", batch_size)
    assert done.returncode == 0, done.stderr
    return read_scores(folder)


def read_scores(folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return the scores and standard errors that lm-eval wrote last."""
    written = sorted((folder / "lm-eval").rglob("results_*.json"))[-1]
    scores: dict[str, float] = {}
    errors: dict[str, float] = {}
    for task, metrics in json.loads(written.read_text())["results"].items():
        for key, value in metrics.items():
            name = f"{task}/{key.removesuffix(',none').removesuffix('_stderr')}"
            if key.endswith(",none") and isinstance(value, float):
                (errors if "_stderr" in key else scores)[name] = value
    return scores, errors


def measured(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder / "run") if "eval/choose/acc" in record]


def test_scores_during_and_after_training_equal_lm_eval_run(trained: Path) -> None:
    records = measured(trained)
    assert [record["step"] for record in records] == [0, 2, 4, 6]
    expected, errors = run_lm_eval(trained, peft=True)
    assert set(expected) == NAMES and errors
    assert {name: records[-1][f"eval/{name}"] for name in NAMES} == expected
    assert {name: records[0][f"eval/{name}"] for name in NAMES} != expected
    command = [str(trained / "run"), "--tasks", ",".join(write_tasks(trained)), "--batch-size", "3"]
    assert evaluate.main([*command, "--json", str(trained / "scores.json")]) == 0
    found = json.loads((trained / "scores.json").read_text())
    assert found["adapter"] == {"scores": expected, "errors": errors}
    assert found["base"]["scores"] == {name: records[0][f"base/{name}"] for name in NAMES}


@pytest.mark.slow
def test_the_base_has_the_scores_of_lm_eval_without_an_adapter(tmp_path: Path) -> None:
    """The model's vocabulary has no padding, which lm-eval would keep without an adapter."""
    from transformers import AutoTokenizer

    make_ground(tmp_path)
    make_model(tmp_path / "model", vocab_size=len(AutoTokenizer.from_pretrained(tmp_path / "model")))
    train_scored(tmp_path)
    expected, _ = run_lm_eval(tmp_path, peft=False)
    assert {name: measured(tmp_path)[0][f"base/{name}"] for name in NAMES} == expected


@pytest.mark.slow
def test_added_tokens_are_scored_with_the_tokenizer_of_the_run(tmp_path: Path) -> None:
    train_scored(make_ground(tmp_path), model__added_tokens=["<|tool|>"])
    expected, _ = run_lm_eval(tmp_path, peft=True)
    assert {name: measured(tmp_path)[-1][f"eval/{name}"] for name in NAMES} == expected


@pytest.mark.slow
def test_a_saved_head_over_a_padded_vocabulary_is_scored_as_a_merged_model(tmp_path: Path) -> None:
    """With peft=RUN, lm-eval shortens the head before PEFT loads the saved one; docs/guide/serving.md says so."""
    train_scored(make_ground(tmp_path), lora__modules_to_save=["lm_head"])
    run = tmp_path / "run"
    done = start_lm_eval(tmp_path, f"pretrained={tmp_path / 'model'},peft={run},tokenizer={run}")
    assert done.returncode != 0 and "size mismatch" in done.stderr
    assert merge.main([str(run)]) == 0
    done = start_lm_eval(tmp_path, f"pretrained={run / 'merged'}")
    assert done.returncode == 0, done.stderr
    found, _ = read_scores(tmp_path)
    last = measured(tmp_path)[-1]
    for name in ("choose/acc", "choose/acc_norm"):
        assert found[name] == last[f"eval/{name}"]
    padded, expected = found["roll/bits_per_byte"], last["eval/roll/bits_per_byte"]
    assert expected < padded < 1.1 * expected, "without peft, lm-eval keeps the padding, which takes some probability"


def test_the_report_and_the_card_have_the_scores_before_and_after(trained: Path) -> None:
    records = read_metrics(trained / "run")
    first, last = (record["eval/write/chrf"] for record in (records[0], records[-1]))
    assert first != last
    row = f"before {first:.4f}, after {last:.4f}"
    assert row in (trained / "run" / "report.html").read_text() and row in (trained / "run" / "README.md").read_text()


def test_evaluating_changes_no_step_of_training(trained: Path) -> None:
    losses = [record["train/loss"] for record in read_metrics(trained / "run") if "train/loss" in record]
    alone = {"training__learning_rate": 0.03, "training__max_steps": 6, "lora__dropout": 0.1}
    scored = {"evaluation__tasks": write_tasks(trained), "training__eval_steps": 2}
    for name, more in (("alone", {}), ("scored", scored)):
        train(trained, output_dir=str(trained / name), **alone, **more)
    runs = [
        [record["train/loss"] for record in read_metrics(trained / name) if "train/loss" in record]
        for name in ("alone", "scored")
    ]
    assert runs[0] == runs[1] != losses


def test_the_adapter_that_a_run_starts_from_is_not_the_base(trained: Path) -> None:
    more = {"training__max_steps": 1, "lora__adapter_path": str(trained / "run"), "evaluation__limit": 4}
    shown = train(trained, output_dir=str(trained / "further"), evaluation__tasks=write_tasks(trained), **more)
    first = read_metrics(trained / "further")[0]
    assert first["base/roll/word_perplexity"] != first["eval/roll/word_perplexity"]
    assert "scores  choose/acc " in shown


def test_the_best_checkpoint_has_the_best_score(trained: Path) -> None:
    settings = {
        "output_dir": str(trained / "best"),
        "evaluation__tasks": write_tasks(trained),
        "training__learning_rate": 0.05,
        "training__lr_scheduler": "constant",
        "training__max_steps": 6,
        "training__eval_steps": 1,
        "training__save_steps": 1,
        "training__best_checkpoint": True,
    }
    for metric, choose in (("write/chrf", max), ("roll/word_perplexity", min)):
        shown = train(trained, **settings, training__best_metric=metric, output__overwrite="delete")
        records: list[dict[str, Any]] = [*read_metrics(trained / "best")]
        found = [(record["step"], record[f"eval/{metric}"]) for record in records if f"eval/{metric}" in record]
        assert [step for step, _ in found[:7]] == [0, 1, 2, 3, 4, 5, 6]
        best, score = choose(found[1:7], key=lambda pair: pair[1])  # of equal scores the first
        kept = re.findall(r"the weights of step (\d+)", shown) or ["6"]
        assert kept == [str(best)] and found[-1][1] == score, found


def test_random_numbers_of_training_are_unchanged(trained: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(trained / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    settings = EvaluationSection(tasks=tuple(write_tasks(trained)[1:2]))

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def seeded() -> None:
        random.seed(5), np.random.seed(5), torch.manual_seed(5)

    seeded()
    expected = draw()
    seeded()
    scorer = TaskEvaluator(settings, tokenizer, 2, Ranks(0, 1, 0))
    first = scorer.measure(model, torch.device("cpu"))
    assert draw() == expected
    assert scorer.measure(model, torch.device("cpu")) == first  # also the few-shot examples are the same


@pytest.mark.parametrize(("batches", "world_size"), [(1, 2), (5, 2), (4, 2), (3, 4), (7, 3), (0, 2)])
def test_every_rank_computes_as_many_batches_and_all_are_computed(batches: int, world_size: int) -> None:
    dealt = [assign_batches(list(range(batches)), Ranks(rank, world_size, rank)) for rank in range(world_size)]
    assert {len(own) for own in dealt} == {-(-batches // world_size)}
    assert {batch for own in dealt for batch in own} == set(range(batches))
    assert all(len(set(own)) == len(own) for own in dealt)  # lm-eval computes a batch once


BAD_TASKS = {
    "gone.yaml": "--tasks=gone.yaml: no such file; use an existing YAML file or the name of a task",
    "broken.yaml": "--tasks=broken.yaml: line 2 is not YAML (",
    "list.yaml": "--tasks=list.yaml: lm-eval cannot load it (Expected YAML dict from ",
    "empty.yaml": "--tasks=empty.yaml: lm-eval cannot load it (it has no dataset_path); check the task",
    "no-data.yaml": "--tasks=no-data.yaml: lm-eval cannot load it (",
    "metrics.yaml": '--tasks=metrics.yaml: metric_list="acc": must be a list; fix this key of the task',
    "shots.yaml": '--tasks=shots.yaml: num_fewshot="two": must be a whole number; fix this key of the task',
    "key.yaml": "--tasks=key.yaml: lm-eval cannot load it (unknown key foo); check the task",
    "split.yaml": "--tasks=split.yaml: lm-eval cannot load it (it has no 'dev'); check the task",
}


@pytest.mark.parametrize("name", BAD_TASKS)
def test_a_task_that_cannot_be_loaded_is_reported(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path)
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    Path("broken.yaml").write_text("task: [\n")
    Path("list.yaml").write_text("- task\n")
    Path("empty.yaml").write_text("task: mine\n")
    Path("no-data.yaml").write_text(Path(write_tasks(tmp_path)[1]).read_text().replace("task-test", "missing"))
    task = yaml.safe_load(Path(write_tasks(tmp_path)[1]).read_text())
    for file, change in (("metrics", {"metric_list": "acc"}), ("shots", {"num_fewshot": "two"})):
        Path(f"{file}.yaml").write_text(yaml.safe_dump(task | change))
    Path("key.yaml").write_text(yaml.safe_dump(task | {"foo": 1}))
    Path("split.yaml").write_text(yaml.safe_dump(task | {"test_split": "dev"}))
    assert evaluate.main([str(run_dir), "--tasks", name]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {BAD_TASKS[name]}") and said.count("\n") == 1, said


def test_without_lm_eval_the_message_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.config.evaluation_section.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"evaluation.tasks=gsm8k: lm-eval is not installed; pip install lm_eval==0.4.13"
    ):
        load_tasks(("gsm8k",))


def test_a_four_bit_base_is_scored(tmp_path: Path) -> None:
    folder = make_ground(tmp_path)
    train(folder, adapter="qlora", evaluation__tasks=write_tasks(folder)[2:], training__max_steps=1)
    scores = [record.get("eval/roll/word_perplexity") for record in read_metrics(folder / "run")]
    assert scores[0] and scores[-1] and scores[0] != scores[-1]
