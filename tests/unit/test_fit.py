"""`scu.scale_to_target`: held-out texts, and the fraction of an update that is within the target."""

import math
from dataclasses import asdict
from itertools import pairwise

import pytest

from tests.unit.test_divergence import CPU, Loop, engine_of, reference
from trainer.patches.loss_head import TokenLoss
from trainer.scu.divergence import Divergence
from trainer.scu.setup import ScaleFit, choose_held_out, find_scale, scale_adapter_to_target


def test_a_part_of_the_update_that_is_within_the_target_is_found() -> None:
    asked: list[float] = []

    def kl_bits(factor: float) -> float:
        asked.append(factor)
        return 0.08 * factor**2

    found = find_scale(kl_bits, 0.02, 64)
    assert found.factor == pytest.approx(0.5, abs=1 / 256) and found.kl_bits_before == 0.08 and len(asked) == 9
    assert found.kl_bits == 0.08 * found.factor**2 <= 0.02
    assert find_scale(kl_bits, 0.08, 64) == ScaleFit(1.0, 0.08, 0.08, 64)
    assert "0.5" in found.format_summary(0.02) and "within the target" in find_scale(kl_bits, 0.1, 64).format_summary(
        0.1
    )


def test_a_k_that_is_no_number_scales_nothing() -> None:
    found = find_scale(lambda _: math.nan, 0.02, 8)
    assert (
        found.factor == 1.0
        and "K is nan bits" in found.format_summary(0.02)
        and "the update is not scaled" in found.format_summary(0.02)
    )


def test_an_adapter_above_the_target_at_every_scale_is_unchanged() -> None:
    """DoRA's magnitudes are no part of what is scaled."""
    found = find_scale(lambda factor: 1.0 + factor, 0.02, 8)
    assert found.factor == 1.0 and found.kl_bits == 2.0 and "the update is not scaled" in found.format_summary(0.02)


@pytest.mark.parametrize("count", [64, 65, 100, 512, 700, 5000])
def test_texts_kept_apart_are_an_eighth_in_groups_of_neighbours(count: int) -> None:
    kept = sorted(choose_held_out(count))
    assert len(kept) == min(64, count // 8 // 8 * 8) and 0 <= kept[0] and kept[-1] < count
    starts = kept[::8]
    assert kept == [start + place for start in starts for place in range(8)]
    gaps = [start - before for before, start in pairwise(starts)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_of_few_texts_none_is_kept_apart() -> None:
    assert choose_held_out(63) == set()


def test_k_of_the_texts_kept_apart_is_that_of_all_of_them_at_once_and_follows_the_factor() -> None:
    loop = Loop(controller="none")
    loop.run(1, 20)
    whole, token_loss, engine = reference(1), TokenLoss(loop.model), engine_of(loop.model)
    batch = whole.build_batch(range(len(whole.documents)))
    base_states = token_loss.compute_base_states(engine, batch, CPU)
    at_once = token_loss.compute_divergence(engine, batch, CPU, base_states=base_states, with_gradient=False)
    tokens = sum(len(document.input_ids) - 1 for document in whole.documents)
    held_out = Divergence(engine, token_loss, whole)
    assert held_out.measure_all() == pytest.approx(at_once.item() / tokens / math.log(2), rel=1e-5)
    scu_controller = Loop(target=held_out.measure_all() / 4).scu_controller
    assert scu_controller.divergence is not None
    lines: list[str] = []
    assert scale_adapter_to_target(scu_controller, loop.model, lines.append) == 1.0 and not lines
    scu_controller.divergence.held_out = held_out
    factor = scale_adapter_to_target(scu_controller, loop.model, lines.append)
    assert 0.3 < factor < 0.7 and len(lines) == 1
    assert held_out.measure_all() == pytest.approx(scu_controller.law.target, rel=0.02)
    assert scu_controller.fitted is not None and set(scu_controller.fitted) == set(asdict(ScaleFit(1.0, 0.0, 0.0, 0)))
    assert held_out.measure_all() == pytest.approx(scu_controller.fitted["kl_bits"], rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_the_texts_kept_apart(ranks: int) -> None:
    parts = [reference(1, rank=rank, world_size=ranks) for rank in range(ranks)]
    count = len(parts[0].documents)
    steps = range(1, 1 + math.ceil(count / ranks))
    seen = [index for part in parts for step in steps for index in part.select(step)]
    assert set(seen) == set(range(count)) and len(seen) < count + ranks
