"""Mixtures of experts under ZeRO: frozen experts in 16 bits, NF4 and MXFP4 train as at stage 0, wherever they lie."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing.spawn import spawn

from tests.distributed.conftest import Matrix, environment, launch
from tests.distributed.plan import case
from tests.distributed.uneven_routing_case import run
from tests.mixtures import make_mixture, store_in_mxfp4
from tests.tiny import make_tokenizer

pytestmark = pytest.mark.distributed

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
FEW = {"training__max_steps": 3, "training__learning_rate": 1e-2, "lora__target_modules": "q_proj,k_proj,v_proj,o_proj"}


def _plan() -> list[dict[str, Any]]:
    cases = [case(f"{kind}-0", zero__stage=0, **settings, **FEW) for kind, settings in KINDS.items()]
    for kind, settings in KINDS.items():
        cases += [case(f"{kind}-{place}", **settings, **where, **FEW) for place, where in PLACES.items()]
    return cases


def make_models(folder: Path) -> None:
    """Three layers, of which two are gathered at a time."""
    make_mixture(folder / "mixtral", "mixtral", num_hidden_layers=3)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    store_in_mxfp4(make_mixture(folder / "gpt_oss", "gpt_oss", num_hidden_layers=3, layer_types=kinds))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder = tmp_path_factory.mktemp("mixtures")
    make_models(folder)
    for name in ("mixtral", "gpt_oss"):
        make_tokenizer(folder / name)
    launch(folder, 2, _plan(), environment())
    return Matrix(folder, _plan())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_stage_0(runs: Matrix, kind: str, place: str) -> None:
    expected, found = runs[f"{kind}-0"], runs[f"{kind}-{place}"]
    assert len(found.losses) == 3
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.records("train/grad_norm") == pytest.approx(expected.records("train/grad_norm"), rel=1e-4)
    assert found.records("eval/loss") == pytest.approx(expected.records("eval/loss"), rel=1e-6)
    if place.startswith("layer"):
        assert "base: cut into" in found.console


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
