"""Reward models are the same at every stage, on any number of ranks, and after resuming."""

import pytest
import torch

from tests.distributed.conftest import Matrix
from tests.distributed.plan import REWARDS

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1500)]


@pytest.mark.parametrize("name", REWARDS)
def test_nothing_depends_on_stages_or_ranks(matrix: Matrix, name: str) -> None:
    one_rank, found = matrix["reward-one-rank"], matrix[f"reward-{name}"]
    assert found.losses[-1] < found.losses[0] - 1e-3
    assert found.losses == pytest.approx(one_rank.losses, abs=1e-6)
    for metric in ("train/rewards/margins", "train/rewards/rejected", "eval/loss", "eval/rewards/accuracies"):
        assert found.records(metric) == pytest.approx(one_rank.records(metric), abs=1e-5, rel=1e-6), metric


def test_packs_and_bases_in_4_bits_agree_over_stages(matrix: Matrix) -> None:
    for kind in ("packed", "nf4"):
        assert matrix[f"reward-{kind}-3"].losses == pytest.approx(matrix[f"reward-{kind}-2"].losses, abs=1e-5), kind


def test_a_resumed_run_continues_to_the_bit(matrix: Matrix) -> None:
    whole, again = matrix["reward-whole"], matrix["reward-again"]
    assert again.losses == whole.losses[3:]
    for key, value in whole.adapter().items():
        assert torch.equal(again.adapter()[key], value), key
