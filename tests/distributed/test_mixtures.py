"""Mixtures of experts under ZeRO: with experts in full precision, NF4 and MXFP4 they train as at stage 0."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing.spawn import spawn

from tests.distributed.alive_experts_case import CASES
from tests.distributed.conftest import Matrix, environment, launch, run_ranks
from tests.distributed.plan import case
from tests.distributed.uneven_routing_case import run
from tests.mixtures import make_mixture, store_in_mxfp4
from tests.tiny import make_tokenizer

pytestmark = [pytest.mark.distributed, pytest.mark.nightly]

MODULE = {"zero__stage": 3, "zero__gather": "module", "zero__persistence_threshold": 0}
OFFLOAD = {"zero__stage": 3, "zero__offload_parameters": True, "zero__offload_optimizer": True}
PLACES: dict[str, dict[str, Any]] = {
    "2": {"zero__stage": 2},
    "layer": {"zero__stage": 3},
    "layer-recomputed": {"zero__stage": 3, "training__gradient_checkpointing": "non_reentrant"},
    "offloaded": OFFLOAD,
    "module": MODULE,
    "module-recomputed": MODULE | {"training__gradient_checkpointing": "non_reentrant"},
}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"base_model": "mixtral"},
    "qlora": {"base_model": "mixtral", "adapter": "qlora"},
    "mxfp4": {"base_model": "gpt_oss"},
}
ATTENTION = {"lora__target_modules": "q_proj,k_proj,v_proj,o_proj"}
FEW = {"training__max_steps": 3, "training__learning_rate": 1e-2}
ADAPTED = ("layer-recomputed", "offloaded", "module-recomputed")
"""Where the experts of gpt-oss are adapted as well."""


def _plan() -> list[dict[str, Any]]:
    cases = []
    for kind, settings in KINDS.items():
        frozen = {**settings, **FEW, **ATTENTION}
        cases.append(case(f"{kind}-0", zero__stage=0, **frozen))
        cases += [case(f"{kind}-{place}", **frozen, **where) for place, where in PLACES.items()]
    adapted = {**KINDS["mxfp4"], **FEW}
    cases.append(case("adapted-0", zero__stage=0, **adapted))
    return cases + [case(f"adapted-{place}", **adapted, **PLACES[place]) for place in ADAPTED]


def make_models(folder: Path) -> None:
    """Three layers; two are gathered at a time."""
    make_mixture(folder / "mixtral", "mixtral", num_hidden_layers=3)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    make_mixture(folder / "relu", "mixtral", num_hidden_layers=3, hidden_act="relu")  # which the operator does not know
    store_in_mxfp4(make_mixture(folder / "gpt_oss", "gpt_oss", num_hidden_layers=3, layer_types=kinds))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder = tmp_path_factory.mktemp("mixtures")
    make_models(folder)
    for name in ("mixtral", "gpt_oss"):
        make_tokenizer(folder / name)
    launch(folder, 2, _plan(), environment())
    return Matrix(folder, _plan())


@pytest.mark.parametrize(
    ("kind", "place"),
    [*((kind, place) for kind in KINDS for place in PLACES), *(("adapted", each) for each in ADAPTED)],
)
def test_losses_are_those_of_stage_0(runs: Matrix, kind: str, place: str) -> None:
    expected, found = runs[f"{kind}-0"], runs[f"{kind}-{place}"]
    assert len(found.losses) == 3
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.records("train/grad_norm") == pytest.approx(expected.records("train/grad_norm"), rel=1e-4)
    assert found.records("eval/loss") == pytest.approx(expected.records("eval/loss"), rel=1e-6)
    if place.startswith("layer"):
        assert "base: sharded in" in found.console


def test_ranks_gather_alike_however_their_tokens_are_routed(tmp_path: Path) -> None:
    """All tokens of rank 0 go to the first expert; those of rank 1 where its router sends them."""
    make_models(tmp_path)
    spawn(run, (tmp_path,), nprocs=2)
    first, second = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in (0, 1))
    for kind, found in first.items():
        assert found["order"] == second[kind]["order"]
        assert len(found["order"]) > 4
        assert found["some"] and second[kind]["some"]
        assert max(found["worst"], second[kind]["worst"]) < 1e-7
        # Half of all visits are those of rank 0, and they are all to one expert.
        assert found["load"] == second[kind]["load"]
        assert 0.5 <= found["load"]["experts/busiest_share"] < 1.0


@pytest.fixture(scope="module")
def alive(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank and case of alive_experts_case.py: bytes of gathered experts that the first forward pass left behind."""
    folder = tmp_path_factory.mktemp("alive")
    make_models(folder)
    module, log = "tests.distributed.alive_experts_case", folder / "log"
    assert run_ranks(2, module, str(folder), env=environment(), log=log, timeout_s=500) == 0, log.read_text()[-3000:]
    return [json.loads((folder / f"alive-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_gathered_experts_do_not_outlive_their_forward(alive: list[dict[str, Any]], name: str) -> None:
    """By layer, the two that are gathered at a time; by module, none."""
    kind, adapted, *_ = CASES[name]
    for found in alive:
        case = found[name]
        assert case["seen"] > 2 * case["two_units"] / 3, "three layers were gathered"
        assert case["alive"] <= case["two_units"]
        assert case["losses"] == pytest.approx(found[f"{kind}-{adapted}-module-kept"]["losses"], rel=1e-6)
