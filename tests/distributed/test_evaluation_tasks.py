"""Tasks of lm-eval and answers on two ranks at every ZeRO stage: the scores of one rank, and no rank waits forever."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.conftest import environment, launch
from tests.distributed.plan import case
from tests.lm_eval_tasks import write_tasks
from trainer.checkpoint.finished_run import find_run, load_saved_tokenizer, load_trained_model
from trainer.config.evaluation_section import EvaluationSection
from trainer.monitor.metrics import read_metrics
from trainer.parallel.ranks.group import Ranks
from trainer.tasks.lm_eval_scores import TaskEvaluator

CASES: dict[str, dict[str, Any]] = {
    "stage-2": {"zero__stage": 2},
    "by-layer": {"zero__stage": 3},
    "by-module": {"zero__stage": 3, "zero__gather": "module", "zero__persistence_threshold": 0},
    "four-bit": {"zero__stage": 3, "adapter": "qlora", "ops__backend": "reference"},
    "sequence": {"parallel__sequence": 2},  # its attention has no mask for padding
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scored")
    # Seven documents, and five held-out prompts: the ranks have different numbers of batches and of tokens to generate.
    common = {
        "evaluation__tasks": write_tasks(folder),
        "evaluation__metrics": ["exact_match", "rouge_l"],
        "evaluation__samples": 5,
        "evaluation__max_new_tokens": 12,
        "training__eval_steps": 2,
        "training__eval_batch_size": 2,
        "training__learning_rate": 0.02,
    }
    launch(folder, 2, [case(name, **common, **changes) for name, changes in CASES.items()], environment())
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_measure_the_same_scores_as_one(folder: Path, name: str) -> None:
    log = (folder / "launch-2.log").read_text()[-3000:]
    assert (folder / f"{name}-done-0").exists() and (folder / f"{name}-done-1").exists(), log
    records: list[dict[str, Any]] = [record for record in read_metrics(folder / name) if "eval/choose/acc" in record]
    assert len(records) > 2
    run = find_run(folder / name)
    tokenizer, device = load_saved_tokenizer(run), torch.device("cpu")
    settings = EvaluationSection(tasks=tuple(write_tasks(folder)))
    model = load_trained_model(run, tokenizer, device)
    scorer = TaskEvaluator(settings, tokenizer, 2, Ranks(0, 1, 0))
    found = scorer.measure(model, device).values
    assert len(found) == 6
    assert {score: records[-1][f"eval/{score}"] for score in found} == pytest.approx(found, rel=1e-5)
    with model.disable_adapter():
        base = scorer.measure(model, device).values
    assert {score: records[0][f"base/{score}"] for score in base} == pytest.approx(base, rel=1e-5)
    assert base["roll/word_perplexity"] != found["roll/word_perplexity"]
    assert 0.0 <= records[-1]["eval/rouge_l"] <= 1.0


def test_all_stages_measure_the_same_answers(folder: Path) -> None:
    first, *others = (
        [record["eval/rouge_l"] for record in read_metrics(folder / name) if "eval/rouge_l" in record]
        for name in ("stage-2", "by-layer", "by-module")
    )
    assert len(first) > 2 and all(other == first for other in others) and first[0] != first[-1]
