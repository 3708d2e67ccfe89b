"""A run of `zerolora compare`: the held-out loss of every document, and none of the files that only training needs."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from rich.console import Console

from benchmarks.compare.measured_run import DOCUMENTS_FILE, HeldOutDocuments, MeasuredRun
from tests.engine import one_rank
from tests.runs_in_process import make_ground, train
from trainer.config import UserError, load_config
from trainer.monitor.metrics import read_metrics
from trainer.parallel.ranks.group import Ranks
from trainer.parallel.ranks.signals import StopRequest
from trainer.setup.preflight import prepare


def test_a_measured_run_trains_as_any_other_and_writes_no_checkpoint(tmp_path: Path) -> None:
    ground = make_ground(tmp_path)
    held_out = f"dataset.evaluation.path={ground / 'held_out.jsonl'}"
    train(ground, dataset__evaluation={"path": str(ground / "held_out.jsonl")}, training__eval_steps=2)
    usual = [record for record in read_metrics(ground / "run") if "eval/loss" in record]

    loaded = load_config(ground / "base.yaml", [held_out, "training.eval_steps=2", f"output_dir={ground / 'measured'}"])
    prepared = prepare(loaded.config)
    documents = HeldOutDocuments(loaded.config, prepared, [])
    with (ground / "console.txt").open("w") as file, TemporaryDirectory() as store, one_rank(Path(store)):
        console = Console(file=file, width=200)
        ranks, stop = Ranks(0, 1, 0), StopRequest()
        run = MeasuredRun(loaded, prepared, ranks, console, stop)
        run.measure(documents.evaluate, documents.measure_scales)
        run.train()
    documents.write(ground / "measured")

    found = json.loads((ground / "measured" / DOCUMENTS_FILE).read_text())
    tokens = sum(found["target_tokens"])
    for record, evaluation in zip(usual, found["evaluations"], strict=True):
        assert evaluation["step"] == record["step"] and len(evaluation["loss_sums"]) == 6
        assert sum(evaluation["loss_sums"]) / tokens == pytest.approx(record["eval/loss"], rel=1e-5)
    # At its whole scale the finished adapter is what the last evaluation measured.
    assert [entry["factor"] for entry in found["scaled"]][-1] == 1.0 and len(found["scaled"]) == 10
    assert found["scaled"][-1]["loss_sums"] == pytest.approx(found["evaluations"][-1]["loss_sums"], rel=1e-5)
    assert found["scaled"][0]["loss_sums"] != pytest.approx(found["evaluations"][-1]["loss_sums"], rel=1e-5)
    names = {path.name for path in (ground / "measured").iterdir()}
    assert "adapter_model.safetensors" in names and "metrics.jsonl" in names
    assert not {name for name in names if name.startswith("checkpoint-")} | (names & {"report.html", "plots"})
    assert "done at step 4" in (ground / "console.txt").read_text()


def test_packs_are_refused(tmp_path: Path) -> None:
    ground = make_ground(tmp_path)
    held_out = f"dataset.evaluation.path={ground / 'held_out.jsonl'}"
    loaded = load_config(ground / "base.yaml", [held_out, "dataset.packing=true"])
    with pytest.raises(UserError, match=r"dataset\.packing=true: documents are measured one by one"):
        HeldOutDocuments(loaded.config, prepare(loaded.config), [])
