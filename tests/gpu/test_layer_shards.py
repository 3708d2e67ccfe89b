"""ZeRO-3 per layer on real GPUs: the losses of stage 2, memory of a share and two layers, hidden gathers.

On one GPU the shards are in host memory, which is the only way anything is sharded there.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.conftest import ROOT, Matrix, launch, run_ranks
from tests.distributed.plan import case
from tests.tiny import make_model

pytestmark = pytest.mark.gpu

GPUS = torch.cuda.device_count()
BF16 = {"training__precision": "bf16"}
OFFLOAD = {"zero__offload_parameters": True}
# Settings under which stage 3 per layer must train what stage 2 trains.
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": BF16,
    "qlora": {"adapter": "qlora", **BF16},
    "peft": {"ops__backend": "peft", **BF16},
    "recompute": {"training__gradient_checkpointing": "non_reentrant", **BF16},
    "selective": {"training__gradient_checkpointing": "selective", **BF16},
    "qlora-recompute": {"adapter": "qlora", "training__gradient_checkpointing": "non_reentrant", **BF16},
    "packed": {"dataset__packing": True, **BF16},
    "fp16": {"training__precision": "fp16"},
}
OFFLOADED = ("fp32", "qlora", "recompute")
ALSO = ("fp32", "bf16", "qlora")  # by DeepSpeed's own stage 3, and on one rank


def plan() -> list[dict[str, Any]]:
    cases = []
    for name, settings in VARIANTS.items():
        common = {"base_model": "wide", **settings}
        cases.append(case(f"{name}-2", zero__stage=2, **common))
        cases.append(case(f"{name}-3", zero__stage=3, **common))
        if name in OFFLOADED:
            cases.append(case(f"{name}-offloaded", zero__stage=3, **OFFLOAD, **common))
    module = {"base_model": "wide", "zero__stage": 3, "zero__gather": "module"}
    return cases + [case(f"{name}-module", **module, **VARIANTS[name]) for name in ALSO]


def plan_of_one_rank() -> list[dict[str, Any]]:
    """The same global batches on one GPU."""
    accumulation = {"training__gradient_accumulation_steps": 2 * GPUS}
    return [case(f"{name}-alone", base_model="wide", zero__stage=2, **accumulation, **VARIANTS[name]) for name in ALSO]


def environment() -> dict[str, str]:
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env.pop("DS_ACCELERATOR", None)
    return env


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder: Path = tmp_path_factory.mktemp("layers-gpu")
    make_model(folder / "wide", vocab_size=4096)
    launch(folder, GPUS, plan(), environment())
    if GPUS > 1:
        launch(folder, 1, plan_of_one_rank(), environment())
    return Matrix(folder, [*plan(), *plan_of_one_rank()])


@pytest.mark.parametrize("name", [*(f"{name}-3" for name in VARIANTS), *(f"{name}-offloaded" for name in OFFLOADED)])
def test_losses_are_those_of_stage_2(runs: Matrix, name: str) -> None:
    """The same kernels on the same weights; only sums over ranks may be taken in another order."""
    variant, _, place = name.rpartition("-")
    layer, expected = runs[name], runs[f"{variant}-2"]
    assert len(layer.losses) == 4
    assert layer.losses == pytest.approx(expected.losses, rel=1e-5 if variant == "fp32" else 1e-3)
    cut = GPUS > 1 or place == "offloaded"
    assert ("base: sharded in 4 units" if cut else "base: not sharded, on the only rank") in layer.console


@pytest.mark.parametrize("variant", ALSO)
def test_deepspeeds_own_stage_3_has_the_losses_of_stage_2(runs: Matrix, variant: str) -> None:
    """It computes q, k, v one by one, which rounds differently in 16 bits."""
    module = runs[f"{variant}-module"]
    assert module.losses == pytest.approx(runs[f"{variant}-2"].losses, rel=1e-5 if variant == "fp32" else 5e-3)
    assert "base: gathered by DeepSpeed (zero.gather: module, as configured)" in module.console


@pytest.mark.skipif(GPUS < 2, reason="one GPU is one rank already")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("variant", ALSO)
def test_one_rank_has_the_losses_of_many(runs: Matrix, variant: str, stage: int) -> None:
    """In 16 bits the gradients of the ranks are rounded before they are summed."""
    alone, many = runs[f"{variant}-alone"], runs[f"{variant}-{stage}"]
    assert many.losses == pytest.approx(alone.losses, rel=1e-5 if variant == "fp32" else 5e-3)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank measured of eight layers of Llama-3.1-8B."""
    folder = tmp_path_factory.mktemp("layers-8b")
    module, log = "tests.gpu.layer_rank", folder / "log"
    code = run_ranks(GPUS, module, str(folder / "measured.json"), env=environment(), log=log, timeout_s=600)
    output = log.read_text()
    print("\n".join(line for line in output.splitlines() if "ms per step" in line))
    assert code == 0, output[-3000:]
    return [json.loads((folder / f"measured-{rank}.json").read_text()) for rank in range(GPUS)]


@pytest.mark.parametrize("kind", ["bf16", "nf4"])
def test_real_layers_give_the_same_losses(measured: list[dict[str, Any]], kind: str) -> None:
    for rank in measured:
        assert rank[f"{kind}-layer"]["losses"] == pytest.approx(rank[f"{kind}-whole"]["losses"], rel=1e-4)


@pytest.mark.parametrize("kind", ["bf16", "nf4"])
def test_a_rank_never_has_more_than_its_shard_and_two_layers(measured: list[dict[str, Any]], kind: str) -> None:
    """Between steps one unit is gathered, for the next pass; in a step two, and what the whole model needs as well."""
    for rank in measured:
        layer, whole = rank[f"{kind}-layer"], rank[f"{kind}-whole"]
        two_units = sum(sorted(layer["units"])[-2:])
        share = layer["share"] if GPUS > 1 else 0  # on the host
        base = sum(layer["units"])
        one_matrix = 4 * 14336 * 4096  # quantised from 32 bits at most
        assert layer["load_peak"] < share + two_units + one_matrix
        assert layer["held"] < whole["held"] - base + share + two_units / 2 + 2**20 * len(layer["units"])
        assert layer["step_peak"] < whole["step_peak"] - base + share + two_units + one_matrix


@pytest.mark.skipif(GPUS < 2, reason="gathers cross no link on one GPU")
@pytest.mark.parametrize("kind", ["bf16", "nf4"])
def test_gathers_hide_behind_the_computation(measured: list[dict[str, Any]], kind: str) -> None:
    """Without engine and optimizer, which take more time in a whole step: the limit is 0.75, the goal 0.85."""
    for rank in measured:
        layer, whole = rank[f"{kind}-layer"], rank[f"{kind}-whole"]
        assert layer["step_ms"] < whole["step_ms"] / 0.75
        assert layer["wait_ms"] < 0.15 * layer["step_ms"]
