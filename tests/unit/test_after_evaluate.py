"""Losses of documents, their token-weighted mean and its bootstrap: against formulas and the trainer's own loss."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import write_chats
from tests.unit.test_after_run import make_run
from trainer.checkpoint.finished_run import FinishedRun, find_run, load_saved_tokenizer, load_trained_model
from trainer.commands import evaluate
from trainer.commands.evaluate import bootstrap, compute_row_losses, load_held_out_samples
from trainer.config import UserError
from trainer.data.batches import collate_samples
from trainer.data.samples import Sample, split_documents
from trainer.patches.loss_head import TokenLoss


def held_out_documents(run: FinishedRun, tokenizer: Any, data: str | None, split: str | None) -> list[Sample]:
    samples, _ = load_held_out_samples(run, tokenizer, data, split)
    return [document for sample in samples for document in split_documents(sample)]


def test_the_loss_weighs_tokens_and_not_documents() -> None:
    found = bootstrap(np.array([10.0, 4.0]), np.array([5.0, 1.0]), np.array([10.0, 1.0]), resamples=500, seed=0)
    assert found["adapter"][0] == pytest.approx(6 / 11)
    assert found["difference"][0] == pytest.approx(-8 / 11)
    # With two documents the extremes are draws of one of them alone.
    assert found["base"] == pytest.approx((14 / 11, 1.0, 4.0))


def test_the_interval_is_that_of_theory_where_theory_has_one() -> None:
    draw = np.random.default_rng(3)
    tokens = np.full(900, 20.0)
    losses = tokens * draw.normal(2.0, 0.6, size=900)
    found = bootstrap(losses, losses - 0.5 * tokens, tokens, resamples=2000, seed=1)
    half = 1.96 * (losses / tokens).std() / math.sqrt(900)
    _, low, high = found["base"]
    assert (high - low) / 2 == pytest.approx(half, rel=0.08)
    assert low < 2.0 < high
    # A paired difference that is the same in every document is certain, however much the documents differ.
    assert found["difference"] == pytest.approx((-0.5, -0.5, -0.5))


def test_the_same_seed_gives_the_same_interval() -> None:
    draw = np.random.default_rng(0)
    losses, tokens = draw.exponential(5.0, size=40), draw.integers(1, 9, size=40).astype(float)
    first, again, other = (bootstrap(losses, losses, tokens, resamples=300, seed=seed) for seed in (4, 4, 5))
    assert first == again != other


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


def test_losses_of_rows_are_those_of_the_rows_alone_and_add_up_to_the_trainers(run_dir: Path) -> None:
    run = find_run(run_dir)
    tokenizer = load_saved_tokenizer(run)
    model = load_trained_model(run, tokenizer, torch.device("cpu"))
    documents = held_out_documents(run, tokenizer, None, None)
    assert len({len(document.input_ids) for document in documents}) > 2
    sums = compute_row_losses(model, collate_samples(documents, 0, packed=False, flat=False))
    alone = [
        compute_row_losses(model, collate_samples([document], 0, packed=False, flat=False)).item()
        for document in documents
    ]
    np.testing.assert_allclose(sums.numpy(), alone, rtol=5e-7)  # in 32 bits, other shapes of the same products
    with torch.no_grad():
        # As the trainer measures a pack: one row, positions restarting, no mask.
        whole = Sample(
            [token for document in documents for token in document.input_ids],
            [trained for document in documents for trained in document.loss_weights],
            [len(document.input_ids) for document in documents],
        )
        packed = TokenLoss(model)(model, collate_samples([whole], 0, packed=True, flat=False), torch.device("cpu"))
    assert packed.item() == pytest.approx(sum(alone), rel=1e-5)


def test_packs_are_taken_apart_into_the_documents_that_were_packed(tmp_path: Path) -> None:
    held = str(write_chats(tmp_path / "all.jsonl", 30, seed=2))
    data = {"path": held, "val_split": 0.4, "max_length": 96, "cache_dir": str(tmp_path / "cache")}
    found = []
    for packing in (False, True):
        folder = tmp_path / str(packing)
        folder.mkdir()
        run = find_run(make_run(folder, dataset=data | {"packing": packing}))
        documents = held_out_documents(run, load_saved_tokenizer(run), None, None)
        found.append(sorted((document.input_ids, document.loss_weights) for document in documents))
    assert len(found[0]) == 12
    assert found[0] == found[1]


def test_the_table_the_file_and_another_data_set(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = {}
    for batch_size, data in (("1", None), ("4", None), ("4", write_chats(tmp_path / "other.jsonl", 40, seed=9))):
        file = tmp_path / f"{batch_size}-{data is None}.json"
        arguments = [str(run_dir), "--batch-size", batch_size, "--samples", "200", "--json", str(file)]
        assert evaluate.main(arguments + (["--data", str(data)] if data else [])) == 0
        records[batch_size, data is None] = json.loads(file.read_text())
    one, four, other = records["1", True], records["4", True], records["4", False]
    assert one["documents"] == 9 and other["documents"] == 40
    assert four["adapter"]["loss"] == pytest.approx(one["adapter"]["loss"], rel=1e-5)
    assert four["base"]["loss_interval"][0] < four["base"]["loss"] < four["base"]["loss_interval"][1]
    assert four["adapter"]["loss"] != pytest.approx(four["base"]["loss"], rel=1e-3)
    assert other["base"]["loss"] != pytest.approx(one["base"]["loss"], rel=1e-6)
    for part in ("base", "adapter"):
        assert four[part]["bits_per_token"] == pytest.approx(four[part]["loss"] / math.log(2))
        assert four[part]["perplexity"] == pytest.approx(math.exp(four[part]["loss"]))
    ratio = four["adapter"]["perplexity"] / four["base"]["perplexity"]
    assert four["difference"]["perplexity_ratio"] == pytest.approx(ratio)
    shown = capsys.readouterr().out
    assert f"{four['adapter']['loss']:.4f}" in shown and f"{four['base']['perplexity']:,.2f}" in shown
    assert shown.count("only 9 documents: the intervals are rough") == 2
    assert max(len(line) for line in shown.splitlines() if "target tokens" not in line) <= 80


def test_evaluate_works_after_the_training_data_was_deleted(run_dir: Path) -> None:
    run = find_run(run_dir)
    assert run.config.dataset.path is not None and not Path(run.config.dataset.path).exists()
    assert len(held_out_documents(run, load_saved_tokenizer(run), None, None)) == 9


def test_a_split_that_is_not_there_is_refused(run_dir: Path, tmp_path: Path) -> None:
    run = find_run(run_dir)
    tokenizer = load_saved_tokenizer(run)
    other = str(write_chats(tmp_path / "other.jsonl", 20))
    assert len(held_out_documents(run, tokenizer, other, "train[:5]")) == 5
    with pytest.raises(UserError, match=r"^--split=nosuch: .* has no such split; remove the setting"):
        held_out_documents(run, tokenizer, other, "nosuch")
    with pytest.raises(UserError, match=r"^--data=gone.jsonl: no such file"):
        held_out_documents(run, tokenizer, "gone.jsonl", None)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--tasks arc_easy --num-fewshot=-1", "--num-fewshot=-1: must be 0 or more"),
        ("--tasks ,", "--tasks=,: empty; pass a task, such as --tasks gsm8k"),
        ("--num-fewshot 0", "--num-fewshot: needs --tasks; add --tasks, or remove this option"),
        ("--limit 3", "--limit: needs --tasks; add --tasks, or remove this option"),
        ("--apply-chat-template", "--apply-chat-template: needs --tasks; add --tasks, or remove this option"),
    ],
)
def test_options_of_tasks_that_cannot_be(
    words: str, line: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.main([str(run_dir), *words.split()]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"
