"""Adapters that are trained together: failures, early stopping, ends and resumption of each for itself."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.preferences import make_pairs_ground, read_metric
from tests.runs_in_process import make_ground, train
from trainer.contract.restart_record import AdapterChanges
from trainer.entry.joint_run import JointRun
from trainer.parallel.engine.flat_adapter import find_flat_adapter
from trainer.patches import many_adapters
from trainer.patches.loss_head import TokenLoss

EXACT = 1e-6
SLOW: dict[str, Any] = {"name": "slow"}
FAST: dict[str, Any] = {"name": "fast", "training.learning_rate": 3e-3, "seed": 5, "lora.r": 8}
LATE: dict[str, Any] = {"name": "late", "training.max_steps": 6, "seed": 9}


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ground(tmp_path_factory.mktemp("together"))


def together(ground: Path, name: str, adapters: list[dict[str, Any]], **overrides: Any) -> Path:
    folder = ground / name
    train(ground, output_dir=str(folder), ops__backend="reference", adapters=adapters, **overrides)
    return folder


def alone(ground: Path, name: str, entry: dict[str, Any], **overrides: Any) -> Path:
    own = {key.replace(".", "__"): value for key, value in entry.items() if key != "name"}
    train(ground, output_dir=str(ground / name), ops__backend="reference", **overrides, **own)
    return ground / name


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


def assert_equal(folder: Path, other: Path) -> None:
    assert losses(folder) == pytest.approx(losses(other), rel=EXACT)
    factors, expected = (load_file(each / "adapter_model.safetensors") for each in (folder, other))
    assert factors.keys() == expected.keys()
    assert all((factors[key] - expected[key]).abs().max() <= EXACT for key in factors)


@pytest.fixture(scope="module")
def references(ground: Path) -> dict[str, Path]:
    return {each["name"]: alone(ground, f"alone-{each['name']}", each) for each in (SLOW, FAST, LATE)}


@pytest.mark.parametrize("packing", [False, True])
def test_a_nan_in_one_adapter_touches_no_other(ground: Path, monkeypatch: pytest.MonkeyPatch, packing: bool) -> None:
    launch = JointRun._launch

    def poison(self: JointRun, active: Any) -> Any:
        if self.runs[1].position.step == 2:
            flat = find_flat_adapter(self._engine.module)
            assert flat is not None
            flat.buffers[1].data.fill_(torch.nan)
        return launch(self, active)

    monkeypatch.setattr(JointRun, "_launch", poison)
    name = f"poisoned-{packing}"
    with pytest.raises(FloatingPointError, match="1 of 3 adapters failed: fast"):
        together(ground, name, [SLOW, FAST, LATE], dataset__packing=packing)
    monkeypatch.undo()
    for each in (SLOW, LATE):
        assert_equal(
            ground / name / each["name"],
            alone(ground, f"alone-{packing}-{each['name']}", each, dataset__packing=packing),
        )
    assert len(losses(ground / name / "fast")) == 2
    assert not (ground / name / "fast" / "adapter_model.safetensors").exists()
    assert (ground / name / "fast" / "checkpoint-2" / "COMPLETE").exists()


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_a_nan_in_the_loss_of_one_of_equal_adapters_touches_no_other(
    ground: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The products of equal adapters are batched."""
    by_part, add = TokenLoss.compute_by_part, many_adapters.add_adapters  # type: ignore[attr-defined]
    calls: list[int] = []

    def poison(self: TokenLoss, *arguments: Any) -> torch.Tensor:
        losses = by_part(self, *arguments)
        factors = [math.nan if index == 1 and calls.count(-1) == 2 else 1.0 for index in range(len(losses))]
        calls.append(-1)
        return losses * torch.tensor(factors)

    def count(x: torch.Tensor, ys: Any, bundles: Any, *others: Any) -> list[torch.Tensor]:
        calls.extend(bundle.count for bundle in bundles)
        return add(x, ys, bundles, *others)

    monkeypatch.setattr(TokenLoss, "compute_by_part", poison)
    monkeypatch.setattr(many_adapters, "add_adapters", count)
    twin = {"name": "twin", "seed": 5, "training.learning_rate": 3e-3}
    with pytest.raises(FloatingPointError, match="1 of 3 adapters failed: twin"):
        together(ground, f"equal-{kind}", [SLOW, twin, LATE], adapter=kind)
    monkeypatch.undo()
    assert {2, 3} <= set(calls), "all three, and then the two that are left"
    for each in (SLOW, LATE):
        alone(ground, f"alone-{kind}-{each['name']}", each, adapter=kind)
        assert_equal(ground / f"equal-{kind}" / each["name"], ground / f"alone-{kind}-{each['name']}")
    assert len(losses(ground / f"equal-{kind}" / "twin")) == 2


def test_a_resumed_run_continues_each_adapter_with_others_around_it(ground: Path, references: dict[str, Path]) -> None:
    """Two of three adapters at step 2, then in another order, one of them left out and one added."""
    half = [{**each, "training.max_steps": 2, "training.lr_scheduler": "constant_with_warmup"} for each in (SLOW, FAST)]
    whole = [{**each, "training.lr_scheduler": "constant_with_warmup"} for each in (LATE, FAST, SLOW)]
    warm = {"training__warmup_steps": 1}
    together(ground, "resumed", half, **warm)
    resume = {"training__resume_from_checkpoint": "latest", **warm}
    together(ground, "resumed", whole[:2], **resume)
    assert_equal(ground / "resumed" / "fast", alone(ground, "whole-fast", whole[1], **warm))
    assert_equal(ground / "resumed" / "late", alone(ground, "whole-late", whole[0], **warm))
    assert len(losses(ground / "resumed" / "slow")) == 2
    result = (ground / "resumed" / "fast" / "adapter_model.safetensors").read_bytes()
    together(ground, "resumed", whole, **resume)
    assert (ground / "resumed" / "fast" / "adapter_model.safetensors").read_bytes() == result, "restored to the bit"
    assert_equal(ground / "resumed" / "slow", alone(ground, "whole-slow", whole[2], **warm))
    assert_equal(ground / "resumed" / "fast", ground / "whole-fast")


def test_a_run_saves_and_stops_after_its_adapters_were_changed(ground: Path, references: dict[str, Path]) -> None:
    (folder := ground / "changed").mkdir()
    AdapterChanges([], "", added=[FAST], removed=["slow"]).write(folder)
    together(ground, "changed", [SLOW, LATE])
    stopped = len(losses(folder / "slow"))
    assert 0 < stopped == len(losses(folder / "late")) < 4
    together(ground, "changed", [LATE, FAST], training__resume_from_checkpoint="latest")
    assert len(losses(folder / "slow")) == stopped
    for name in ("late", "fast"):
        assert_equal(folder / name, references[name])


def test_an_adapter_that_stops_early_leaves_the_others_unchanged(ground: Path, references: dict[str, Path]) -> None:
    early = {"training.eval_steps": 1, "training.early_stopping": 1, "training.early_stopping_threshold": 100.0}
    held_out = {"dataset.evaluation": {"path": str(ground / "held_out.jsonl")}}
    folder = together(ground, "early", [{**SLOW, **early, **held_out}, FAST, LATE])
    assert len(losses(folder / "slow")) == 2, "the first evaluation is the best, the second is not better"
    assert (folder / "slow" / "adapter_model.safetensors").exists()
    for name in ("fast", "late"):
        assert_equal(folder / name, references[name])
    page = (folder / "sweep.html").read_text()
    assert all(name in page for name in ("slow", "fast", "late"))


def test_an_adapter_continues_alone_from_a_common_run(ground: Path, references: dict[str, Path]) -> None:
    half = [{**each, "training.save_steps": 2} for each in (SLOW, FAST)]
    folder = together(ground, "parted", half)
    alone(ground, "parted-fast", FAST, training__resume_from_checkpoint=str(folder / "fast" / "checkpoint-2"))
    factors, expected = (
        load_file(each / "adapter_model.safetensors") for each in (ground / "parted-fast", references["fast"])
    )
    assert all((factors[key] - expected[key]).abs().max() <= EXACT for key in factors)


@pytest.mark.parametrize("measure", ["delta", "factors"])
def test_each_adapter_has_its_own_controller(ground: Path, measure: str) -> None:
    common, target = {"scu.enabled": True, "scu.measure": measure}, 0.02 if measure == "delta" else 0.99
    steered: list[dict[str, Any]] = [
        {**FAST, **common, "scu.law": "published", "scu.target": target, "name": "pi"},
        {**SLOW, **common, "scu.controller": "fixed", "scu.lambda_start": 50.0, "name": "fixed"},
        LATE,
    ]
    folder = together(ground, f"steered-{measure}", steered)
    for each in steered:
        expected = alone(ground, f"steered-{measure}-{each['name']}", each)
        assert_equal(folder / each["name"], expected)
        if "scu.enabled" not in each:
            continue
        files = (part / "scu_metrics.json" for part in (folder / each["name"], expected))
        found, wanted = (json.loads(file.read_text()) for file in files)
        assert [line["lambda"] for line in found] == pytest.approx([line["lambda"] for line in wanted], rel=1e-5)
        assert [line["param_bpt"] for line in found] == pytest.approx([line["param_bpt"] for line in wanted], rel=1e-4)
        assert len({line["lambda"] for line in found}) > 1 or each["name"] == "fixed"


def test_each_adapter_has_its_own_preference_loss(tmp_path: Path) -> None:
    ground = make_pairs_ground(tmp_path, 30, 6)
    shared = {"task": "preference", "dataset__packing": True, "dataset__max_length": 192, "training__batch_size": 2}
    adapters: list[dict[str, Any]] = [
        {"name": "dpo"},
        {"name": "ipo", "preference.loss": "ipo", "preference.beta": 0.5, "seed": 4, "training.learning_rate": 3e-3},
        {"name": "sft", "preference.loss": {"sft": 1.0}, "seed": 5},
    ]
    folder = together(ground, "joint", adapters, **shared)
    for each in adapters:
        expected = alone(ground, f"alone-{each['name']}", each, **shared)
        assert_equal(folder / each["name"], expected)
        for metric in ("train/rewards/margins", "train/kl_bits", "train/logps/chosen"):
            values = read_metric(expected, metric)
            assert read_metric(folder / each["name"], metric) == pytest.approx(values, rel=1e-5, abs=1e-6), metric
            assert bool(values) == (metric != "train/kl_bits" or each["name"] != "sft")
    assert len({losses(folder / each["name"])[-1] for each in adapters}) == len(adapters)


def test_adapters_share_what_their_epochs_and_dropout_do_not(ground: Path) -> None:
    """Settings that differ: epochs instead of steps, and dropout of one adapter only."""
    shared = {"dataset__packing": True, "dataset__max_length": 32}
    adapters: list[dict[str, Any]] = [
        {"name": "epochs", "training.max_steps": None, "training.epochs": 0.5},
        {"name": "dropout", "lora.dropout": 0.3, "seed": 3},
    ]
    folder = together(ground, "mixed", adapters, **shared)
    for each in adapters:
        assert_equal(folder / each["name"], alone(ground, f"mixed-{each['name']}", each, **shared))
    assert len(losses(folder / "epochs")) != len(losses(folder / "dropout")) == 4
