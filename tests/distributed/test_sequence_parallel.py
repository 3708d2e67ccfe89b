"""Ranks that share sequences give the losses and adapters of one rank with whole sequences."""

import os
from typing import Any

import pytest
import torch

from tests.distributed.conftest import Matrix, environment, launch
from tests.distributed.plan import LABELED, PAIRED, case
from tests.families import save_family
from tests.tiny import make_model

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-6
LONG = {"dataset__max_length": 250, "training__batch_size": 1}
"""Packs of many documents that span two ranks, some with an odd number of tokens."""
# Adam divides by the size of a gradient, so one that is only rounding would move a weight by more than the tolerance.
GEMMA = {"base_model": "gemma", "training__adam_epsilon": 1e-6}
PACKED = {"dataset__packing": True, **LONG}
METRICS = (
    "train/loss", "train/tokens", "train/target_tokens", "eval/loss", "scu/s_ratio", "scu/lambda",
    "train/logps/chosen", "train/rewards/margins", "eval/rewards/accuracies", "train/kl", "train/entropy",
    "train/kl_bits",
)  # fmt: skip
"""Metrics that must agree if both runs have them."""
SUMMED = {"train/kl": 1e-5}
"""A difference of log-probabilities of answers, some 40 nats each, which fp32 rounds to 4e-6."""
SETTINGS: dict[str, dict[str, Any]] = {
    "packed-0": {**PACKED, "zero__stage": 0},
    "rows-2": {"zero__stage": 2, "ops__backend": "reference"},
    "nf4-3": {**PACKED, "zero__stage": 3, "adapter": "qlora", "ops__backend": "reference"},
    "one-key-head-2": {**PACKED, "zero__stage": 2, "base_model": "one-key-head"},
    "gemma-2": {**PACKED, "zero__stage": 2, **GEMMA},
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
    "gemma-3": {**PACKED, "zero__stage": 3, **GEMMA},
    "gemma-rows-0": {"zero__stage": 0, **GEMMA},
    "qwen2-3": {**PACKED, "zero__stage": 3, "base_model": "qwen2"},
    "experts-2": {**PACKED, "zero__stage": 2, "base_model": "experts"},
    "experts-nf4-3": {"zero__stage": 3, "base_model": "experts", "adapter": "qlora"},
    "steered-2": {**PACKED, "zero__stage": 2, "scu__enabled": True, "scu__target": 0.01},
    "fp8-2": {
        **PACKED, "zero__stage": 2, "adapter": "qlora", "quantization__quant_type": "fp8", "ops__backend": "reference",
    },
    "rounded-2": {**PACKED, "zero__stage": 2, "training__qat": "int8"},
    "offloaded-3": {**PACKED, "zero__stage": 3, "zero__offload_optimizer": True, "zero__offload_parameters": True},
    "by-tokens-2": {"zero__stage": 2, "dataset__batching": "tokens"},
    "streamed-2": {"dataset__streaming": True, "dataset__evaluation": None, "zero__stage": 2},
    "pairs-0": {**PAIRED, "zero__stage": 0, "preference__length_weight": 0.5},
    "pairs-packed-3": {**PAIRED, "dataset__packing": True, "dataset__max_length": 250, "zero__stage": 3},
    "pairs-cached-2": {**PAIRED, "zero__stage": 2, "preference__reference": "cached"},
    "pairs-recomputed-2": {**PAIRED, "zero__stage": 2, "training__gradient_checkpointing": "non_reentrant"},
    "weighted-2": {**PAIRED, "preference__weighting": "wpo", "zero__stage": 2},
    "labels-2": {**LABELED, "training__batch_size": 2, "training__learning_rate": 1e-3, "zero__stage": 2},
    "answers-3": {**PACKED, "zero__stage": 3, "logging__sample_prompts": ["red cat"], "logging__sample_tokens": 4},
}  # fmt: skip
CUT = {**PACKED, "training__save_steps": 2, "zero__stage": 2}
SHARED = {**CUT, "parallel__sequence": 2}
ALONE = {**CUT, "training__gradient_accumulation_steps": 1}
"""The same global batch on two ranks that share no sequences."""
RESUMES: dict[str, dict[str, Any]] = {
    "cut": SHARED,
    "cut-alone": ALONE,
    "to-shared": {**SHARED, "training__resume_from_checkpoint": "cut/checkpoint-2"},
    "to-alone": {**ALONE, "training__resume_from_checkpoint": "cut/checkpoint-2"},
    "alone-to-shared": {**SHARED, "training__resume_from_checkpoint": "cut-alone/checkpoint-2"},
}


BY_FOUR = ("rows-3", "gemma-3", "experts-2", "labels-2")
"""Sequences that four ranks share; the others are shared by two and two."""


def plan(settings: dict[str, dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """The cases on so many ranks, with one global batch on any number."""
    cases = []
    for name, changes in settings.items():
        by_two = {"parallel__sequence": 2, "training__gradient_accumulation_steps": 1}
        shared = by_two if ranks == 4 and name not in BY_FOUR else {"parallel__sequence": ranks}
        cases.append(case(f"{name}-of-{ranks}", **changes, **shared))
    return cases


def train(folder: Any, settings: dict[str, dict[str, Any]], *ranks: int) -> Matrix:
    make_model(folder / "one-key-head", num_key_value_heads=1)
    save_family(folder / "gemma", "gemma3_text")
    save_family(folder / "qwen2", "qwen2")
    save_family(folder / "experts", "qwen3_moe")
    plans = {size: plan(settings, size) for size in ranks}
    if settings is MORE:
        plans[2] += [case(name, **changes) for name, changes in RESUMES.items()]
    with pytest.MonkeyPatch.context() as patch:
        # Ranks of this size take turns on fewer cores.
        patch.setattr(os, "sched_getaffinity", lambda process: set(range(max(ranks))))
        for size, cases in plans.items():
            launch(folder, size, cases, environment())
    return Matrix(folder, [each for cases in plans.values() for each in cases])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return train(tmp_path_factory.mktemp("sequences"), SETTINGS, 1, 2)


@pytest.fixture(scope="module")
def more_runs(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return train(tmp_path_factory.mktemp("more-sequences"), MORE, 1, 2, 4)


def compare(runs: Matrix, name: str, ranks: int) -> None:
    alone, shared = runs[f"{name}-of-1"], runs[f"{name}-of-{ranks}"]
    assert len(alone.losses) == 4
    trained = [value.abs().max() for key, value in alone.adapter().items() if "lora_B" in key]
    assert trained and min(trained) > 1e-4, "B begins at zero"
    assert f"each is split over {4 if ranks == 4 and name in BY_FOUR else 2} ranks" in shared.console
    tolerance = 1e-5 if "fp8" in name else TOLERANCE  # roundings to 8 bits may flip
    for metric in METRICS:
        assert shared.records(metric) == pytest.approx(
            alone.records(metric), abs=tolerance + SUMMED.get(metric, 0.0), rel=1e-7
        ), metric
    for key, value in alone.adapter().items():
        torch.testing.assert_close(shared.adapter()[key], value, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_that_share_sequences_train_as_one(runs: Matrix, name: str) -> None:
    compare(runs, name, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", MORE)
def test_other_settings_and_four_ranks_train_as_one(more_runs: Matrix, name: str, ranks: int) -> None:
    compare(more_runs, name, ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["to-shared", "to-alone", "alone-to-shared"])
def test_a_run_resumes_with_another_number_of_sharing_ranks(more_runs: Matrix, name: str) -> None:
    whole, again = more_runs["cut"], more_runs[name]
    assert "resumed from" in again.console
    assert again.losses == pytest.approx(whole.losses[2:], abs=TOLERANCE)
    for key, value in whole.adapter().items():
        torch.testing.assert_close(again.adapter()[key], value, atol=TOLERANCE, rtol=0)
