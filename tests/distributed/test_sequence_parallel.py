"""Sequences shared by ranks: the losses and adapters of one rank that has them whole."""

from typing import Any

import pytest
import torch

from tests.distributed.conftest import Matrix, environment, launch
from tests.distributed.plan import case
from tests.families import save_family
from tests.tiny import make_model

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-6
LONG = {"dataset__max_length": 250, "training__batch_size": 1}
"""Packs of many documents, which do not end at the border of two ranks, some of an odd number of tokens."""
PACKED = {"dataset__packing": True, **LONG}
SETTINGS: dict[str, dict[str, Any]] = {
    "packed-0": {**PACKED, "zero__stage": 0},
    "rows-2": {"zero__stage": 2, "ops__backend": "reference"},
    "nf4-3": {**PACKED, "zero__stage": 3, "adapter": "qlora", "ops__backend": "reference"},
    "one-key-head-2": {**PACKED, "zero__stage": 2, "base_model": "one-key-head"},
    "gemma-2": {**PACKED, "zero__stage": 2, "base_model": "gemma"},
    "experts-3": {**PACKED, "zero__stage": 3, "base_model": "experts"},
}
MORE: dict[str, dict[str, Any]] = {
    "packed-2": {**PACKED, "zero__stage": 2},
    "packed-3": {**PACKED, "zero__stage": 3},
    "rows-0": {"zero__stage": 0},
    "rows-3": {"zero__stage": 3},
    "recomputed-0": {**PACKED, "zero__stage": 0, "training__gradient_checkpointing": "non_reentrant"},
    "selective-3": {**PACKED, "zero__stage": 3, "training__gradient_checkpointing": "selective"},
    "by-module-3": {**PACKED, "zero__stage": 3, "zero__gather": "module", "zero__persistence_threshold": 0},
    "nf4-0": {**PACKED, "zero__stage": 0, "adapter": "qlora"},
    "gemma-3": {**PACKED, "zero__stage": 3, "base_model": "gemma"},
    "gemma-rows-0": {"zero__stage": 0, "base_model": "gemma"},
    "qwen2-3": {**PACKED, "zero__stage": 3, "base_model": "qwen2"},
    "experts-2": {**PACKED, "zero__stage": 2, "base_model": "experts"},
    "experts-nf4-3": {"zero__stage": 3, "base_model": "experts", "adapter": "qlora"},
    "streamed-2": {"dataset__streaming": True, "dataset__evaluation": None, "zero__stage": 2},
    "answers-3": {**PACKED, "zero__stage": 3, "logging__sample_prompts": ["red cat"], "logging__sample_tokens": 4},
}
CUT = {**PACKED, "training__max_steps": 4, "training__save_steps": 2, "zero__stage": 2}


def plan(settings: dict[str, dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """The cases with sequences whole, or shared by `size` ranks, that is with one global batch."""
    return [case(f"{name}-of-{size}", parallel__sequence=size, **changes) for name, changes in settings.items()]


def train(folder: Any, settings: dict[str, dict[str, Any]], *ranks: int) -> Matrix:
    make_model(folder / "one-key-head", num_key_value_heads=1)
    save_family(folder / "gemma", "gemma3_text")
    save_family(folder / "qwen2", "qwen2")
    save_family(folder / "experts", "qwen3_moe")
    for size in ranks:
        launch(folder, size, plan(settings, size), environment())
    return Matrix(folder, [each for size in ranks for each in plan(settings, size)])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return train(tmp_path_factory.mktemp("sequences"), SETTINGS, 1, 2)


@pytest.fixture(scope="module")
def more_runs(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return train(tmp_path_factory.mktemp("more-sequences"), MORE, 1, 2, 4)


def compare(runs: Matrix, name: str, size: int) -> None:
    alone, shared = runs[f"{name}-of-1"], runs[f"{name}-of-{size}"]
    assert len(alone.losses) == 4 and alone.losses[-1] < alone.losses[0]
    assert f"each is shared by {size} ranks" in shared.console
    for metric in ("train/loss", "train/tokens", "train/target_tokens", "eval/loss"):
        assert shared.records(metric) == pytest.approx(alone.records(metric), abs=TOLERANCE), metric
    for key, value in alone.adapter().items():
        torch.testing.assert_close(shared.adapter()[key], value, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_that_share_sequences_train_as_one(runs: Matrix, name: str) -> None:
    compare(runs, name, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MORE)
def test_other_settings_and_four_ranks_train_as_one(more_runs: Matrix, name: str, size: int) -> None:
    compare(more_runs, name, size)
