"""Packs of models with recurrent layers on two ranks: the losses of plain PEFT on each document alone."""

from typing import Any

import pytest
import torch

from tests.distributed.conftest import Matrix, environment, launch
from tests.distributed.plan import case
from tests.families import save_family
from tests.mixtures import store_dequantised
from tests.plain_peft import plain_losses
from trainer.config import load_config

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

NAMES = ("qwen3_5_text", "granitemoehybrid", "lfm2")
COMMON = {"dataset__packing": True, "ops__backend": "reference", "training__learning_rate": 1e-2}
WAYS: dict[str, dict[str, Any]] = {
    "stage3": {"zero__stage": 3},
    "recomputed": {"training__gradient_checkpointing": "non_reentrant"},
    "qlora": {"adapter": "qlora", "zero__stage": 3, "training__gradient_checkpointing": "non_reentrant"},
}
OF_ONE: dict[str, dict[str, Any]] = {
    "module": {"zero__stage": 3, "zero__gather": "module", "zero__persistence_threshold": 0},
    "selective": {"training__gradient_checkpointing": "selective", "ops__backend": "peft"},
}


def plan() -> list[dict[str, Any]]:
    cases = [
        case(f"{name}-{way}", base_model=f"{name}-model", **(COMMON | settings))
        for name in NAMES
        for way, settings in WAYS.items()
    ]
    first = f"{NAMES[0]}-model"
    return cases + [case(f"{NAMES[0]}-{way}", base_model=first, **(COMMON | OF_ONE[way])) for way in OF_ONE]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder = tmp_path_factory.mktemp("recurrent")
    for name in NAMES:
        save_family(folder / f"{name}-model", name)
        store_dequantised(folder / f"{name}-model", folder / f"{name}-dequantised", four_bit=True)
    launch(folder, 2, plan(), environment())
    return Matrix(folder, plan())


def expected(runs: Matrix, name: str, model: str) -> list[float]:
    folder = runs[f"{name}-stage3"].folder.parent
    settings = [f"base_model={folder / name}-{model}", "training.learning_rate=1e-2", "dataset.packing=true"]
    config = load_config(folder / "base.yaml", settings).config
    return plain_losses(config, ranks=2, attention=None, device=torch.device("cpu"))


@pytest.mark.parametrize("name", NAMES)
def test_packed_losses_are_those_of_the_documents_one_by_one(runs: Matrix, name: str) -> None:
    whole = expected(runs, name, "model")
    assert len({round(loss, 4) for loss in whole}) > 1
    for way in ("stage3", "recomputed", *(OF_ONE if name == NAMES[0] else ())):
        assert runs[f"{name}-{way}"].losses == pytest.approx(whole, rel=1e-6), way


@pytest.mark.parametrize("name", NAMES)
def test_packed_losses_in_4_bits_are_those_of_the_documents_one_by_one(runs: Matrix, name: str) -> None:
    assert runs[f"{name}-qlora"].losses == pytest.approx(expected(runs, name, "dequantised"), rel=1e-6)
