"""`scu.measure: kl` in whole runs on two ranks: the same metrics at every stage, and with the base's states kept."""

import json
from itertools import pairwise
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.conftest import Case, Matrix, environment, launch
from tests.distributed.plan import case
from tests.tiny import write_chats

pytestmark = [pytest.mark.distributed, pytest.mark.nightly]

STEPS, CUT = 7, 5
# A learning rate at which the tiny model is soon past the target, so that lambda works for most of the steps.
TRAINING = {
    "training__max_steps": STEPS,
    "training__gradient_accumulation_steps": 2,
    "training__learning_rate": 1e-2,
    "scu__enabled": True,
    "scu__measure": "kl",
    "scu__target": 0.0005,
    "scu__deadband": 0.0,
    "scu__check_every": 2,
    "scu__reference_share": 0.5,
    "scu__reference_cache": False,
}
KEPT = {"scu__reference_cache": True}
LAYER: dict[str, Any] = {"zero__stage": 3, "zero__gather": "layer"}
MODULE: dict[str, Any] = {"zero__stage": 3, "zero__gather": "module", "zero__persistence_threshold": 0}
RECOMPUTED = {"training__gradient_checkpointing": "non_reentrant"}
PACKED = {"dataset__packing": True}
# What the others are compared with.
STANDARDS: dict[str, dict[str, Any]] = {
    "plain": {"zero__stage": 2},
    "packed": {"zero__stage": 2, **PACKED},
    "qlora": {"zero__stage": 3, "adapter": "qlora", **PACKED},
}
WAYS: dict[str, dict[str, Any]] = {
    "plain-0": {"zero__stage": 0},
    "plain-layer": LAYER,
    "plain-module": MODULE,
    "plain-layer-kept": LAYER | KEPT,
    "packed-0": {"zero__stage": 0, "ops__backend": "reference", **PACKED, **KEPT},
    "packed-2": {"zero__stage": 2, **PACKED},
    "packed-layer": LAYER | PACKED | RECOMPUTED | KEPT,
    "packed-module": MODULE | PACKED | KEPT,
    "qlora-1": {"zero__stage": 1, "adapter": "qlora", **PACKED, **KEPT},
}
# Saved at the end as well, where nothing has been scaled yet.
FITTED = {"scu__target": 0.0002, "scu__lambda_max": 0.2, "training__save_steps": STEPS}
FITS: dict[str, dict[str, Any]] = {
    "fitted-0": FITTED | {"zero__stage": 0},
    "fitted-2": FITTED | {"zero__stage": 2, **PACKED},
    "fitted-layer": FITTED | LAYER,
}
RELATIVE = 1e-4  # of a K of some thousandths of a bit, the difference of two sums in 32 bits


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder = tmp_path_factory.mktemp("kl")
    write_chats(folder / "reference.jsonl", 9, seed=4)
    settings = {**TRAINING, "scu__reference": str(folder / "reference.jsonl")}
    cases = [case(name, **(settings | way)) for name, way in (STANDARDS | WAYS).items()]
    write_chats(folder / "many.jsonl", 72, seed=5)
    cases += [
        case(name, **(TRAINING | {"scu__reference": str(folder / "many.jsonl")} | way)) for name, way in FITS.items()
    ]
    for name, way in {"whole": {}, "whole-packed": KEPT | PACKED | {"lora__dropout": 0.1}}.items():
        saved = settings | {"zero__stage": 3, "training__save_steps": CUT} | way
        cases.append(case(name, **saved))
        again = {"training__resume_from_checkpoint": f"{name}/checkpoint-{CUT}", "output_dir": f"again-{name}"}
        cases.append(case(f"again-{name}", **saved, **again))
    launch(folder, 2, cases, environment())
    return Matrix(folder, cases)


def read_records(run: Case) -> list[dict[str, float]]:
    records: list[dict[str, float]] = json.loads((run.folder / "scu_metrics.json").read_text())
    return records


@pytest.mark.parametrize("way", WAYS)
def test_every_way_holds_the_same_k_by_the_same_lambda(runs: Matrix, way: str) -> None:
    other = next(name for name in STANDARDS if name.split("-")[0] == way.split("-")[0])
    ours, theirs = read_records(runs[way]), read_records(runs[other])
    for name in ("kl_bits", "lambda", "ce_loss"):
        wanted = [record[name] for record in theirs]
        assert [record[name] for record in ours] == pytest.approx(wanted, rel=RELATIVE, abs=1e-7), name
    lambdas = [record["lambda"] for record in theirs]
    assert lambdas[0] == 0.0 and lambdas[-1] > 0.0, "lambda never worked"
    assert sum(one != another for one, another in pairwise(lambdas)) >= STEPS // 2
    for name, value in runs[other].adapter().items():
        # Seven steps of AdamW at a rate of 1e-2; the first follow the sign of rounding noise; 7.1e-6 seen.
        torch.testing.assert_close(runs[way].adapter()[name], value, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("name", ["whole", "whole-packed"])
def test_a_resumed_run_holds_k_to_the_bit(runs: Matrix, name: str) -> None:
    whole, again = read_records(runs[name]), read_records(runs[f"again-{name}"])
    assert again == [record for record in whole if record["step"] >= CUT]
    for key, value in runs[name].adapter().items():
        assert torch.equal(runs[f"again-{name}"].adapter()[key], value)


@pytest.mark.parametrize("name", FITS)
def test_what_is_saved_is_the_part_of_the_update_that_is_within_the_target(runs: Matrix, name: str) -> None:
    run = runs[name]
    fitted = json.loads((run.folder / "scu_config.json").read_text())["fitted"]
    assert fitted["texts"] == 8 and 0.0 < fitted["factor"] < 1.0
    assert fitted["kl_bits"] <= FITTED["scu__target"] < fitted["kl_bits_before"]
    assert fitted["kl_bits"] == pytest.approx(FITTED["scu__target"], rel=0.1)
    trained = load_file(run.folder / f"checkpoint-{STEPS}" / "adapter_model.safetensors")
    for key, value in run.adapter().items():
        torch.testing.assert_close(
            value, trained[key] * (fitted["factor"] if "lora_B" in key else 1.0), rtol=1e-6, atol=0.0
        )


def test_every_stage_finds_the_same_part(runs: Matrix) -> None:
    found = [
        json.loads((runs[name].folder / "scu_config.json").read_text())["fitted"]
        for name in ("fitted-0", "fitted-layer")
    ]
    assert found[0]["kl_bits_before"] == pytest.approx(found[1]["kl_bits_before"], rel=1e-3)
    assert abs(found[0]["factor"] - found[1]["factor"]) <= 1 / 256
