"""Training on pairs of answers is the same at every stage, on any number of ranks, and after resuming."""

import pytest
import torch

from tests.distributed.conftest import Matrix
from tests.distributed.plan import KTO, PREFERENCES
from tests.preferences import LN_2

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1500)]


@pytest.mark.parametrize("name", PREFERENCES)
def test_nothing_depends_on_stages_ranks_or_operators(matrix: Matrix, name: str) -> None:
    one_rank, found = matrix["pairs-one-rank"], matrix[f"pairs-{name}"]
    assert found.losses[0] == pytest.approx(LN_2, abs=1e-6)
    assert found.losses[-1] < LN_2 - 1e-3
    assert ("prompts: shared by pairs" in found.console) == (name == "shared")
    if name != "by-tokens":  # pairs of like lengths together are other global batches
        assert found.losses == pytest.approx(one_rank.losses, abs=1e-6)
        for metric in ("train/rewards/margins", "train/logps/rejected", "eval/loss", "eval/rewards/accuracies"):
            assert found.records(metric) == pytest.approx(one_rank.records(metric), abs=1e-5, rel=1e-6), metric
        for metric in ("train/entropy", "eval/entropy", "train/kl_bits", "eval/kl_bits"):
            known = found.records(metric)
            assert known or ("kl" in metric and name in ("cached", "by-module")), metric
            assert known == pytest.approx(one_rank.records(metric) if known else [], abs=1e-5), metric


def test_packs_agree_over_stages(matrix: Matrix) -> None:
    assert matrix["pairs-packed3"].losses == pytest.approx(matrix["pairs-packed2"].losses, abs=1e-6)
    assert matrix["pairs-packed-cached"].losses == pytest.approx(matrix["pairs-packed2"].losses, abs=1e-6)
    assert matrix["pairs-packed2"].losses[0] == pytest.approx(LN_2, abs=1e-6)


def test_a_base_in_4_bits_is_its_own_reference(matrix: Matrix) -> None:
    assert "prompts: shared by pairs" in matrix["pairs-nf4-3"].console
    assert matrix["pairs-nf4-0"].losses[0] == pytest.approx(LN_2, abs=1e-6)
    assert matrix["pairs-nf4-3"].losses == pytest.approx(matrix["pairs-nf4-0"].losses, abs=1e-5)


def test_the_reference_has_no_dropout(matrix: Matrix) -> None:
    """Its log-probabilities are those of the same documents without an adapter, in the first step as well."""
    plain, dropped = matrix["pairs-stage2"], matrix["pairs-dropout"]
    assert dropped.losses[0] == pytest.approx(LN_2, abs=1e-6)  # B is 0
    assert dropped.losses[1:] != pytest.approx(plain.losses[1:], abs=1e-5)
    assert matrix["pairs-dropout-recomputed"].losses == pytest.approx(dropped.losses, abs=1e-6)


def test_the_divergence_from_the_base_is_measured_along(matrix: Matrix) -> None:
    assert matrix["pairs-kl"].losses[0] == pytest.approx(LN_2, abs=1e-6)
    assert matrix["pairs-kl"].records("scu/kl_bits")[-1] > 0


def test_a_resumed_run_continues_to_the_bit(matrix: Matrix) -> None:
    whole, again = matrix["pairs-whole"], matrix["pairs-again"]
    assert again.losses == whole.losses[3:]
    for key, value in whole.adapter().items():
        assert torch.equal(again.adapter()[key], value), key


def test_a_stream_of_pairs_gives_the_same_losses(matrix: Matrix) -> None:
    assert matrix["pairs-streamed"].losses == pytest.approx(matrix["pairs-in-order"].losses, abs=1e-6)


@pytest.mark.parametrize("name", KTO)
def test_labelled_answers_share_one_baseline(matrix: Matrix, name: str) -> None:
    """Two ranks of two answers and one rank of four have the same mean of mismatched answers in every micro-step."""
    one_rank, found = matrix["kto-one-rank"], matrix[f"kto-{name}"]
    assert found.losses[0] == pytest.approx(0.5, abs=1e-6)
    assert found.losses[-1] < 0.5 - 1e-3
    assert max(found.records("train/kl")) > 1e-3
    assert found.losses == pytest.approx(one_rank.losses, abs=1e-6)
    for metric in ("train/kl", "train/rewards/margins", "eval/loss", "eval/kl"):
        assert found.records(metric) == pytest.approx(one_rank.records(metric), abs=1e-5, rel=1e-6), metric


def test_labelled_answers_train_a_base_in_4_bits(matrix: Matrix) -> None:
    assert matrix["kto-nf4-2"].losses[0] == pytest.approx(0.5, abs=1e-6)
    assert matrix["kto-nf4-3"].losses == pytest.approx(matrix["kto-nf4-2"].losses, abs=1e-5)
