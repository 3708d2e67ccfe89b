"""What the run tells of losses that jump and of ranks that are slow; the numbers are given."""

import json
import time

import pytest
import torch

from trainer.checkpoint.checkpoint import Position
from trainer.monitor.hooks import HISTORY_STEPS, MIN_HISTORY, FinishedStep, SpikeDetector
from trainer.parallel.ranks.group import Ranks
from trainer.parallel.ranks.stragglers import MIN_SLOW_WINDOWS, WINDOW_STEPS, StragglerWatch


def noisy(count: int) -> list[float]:
    draw = torch.Generator().manual_seed(0)
    return (2.0 + 0.1 * torch.randn(count, generator=draw)).tolist()


def test_a_loss_far_above_the_last_ones_is_told_once() -> None:
    said: list[str] = []
    position = Position()
    spikes = SpikeDetector(said.append, position)
    losses = noisy(60)
    losses[40:43] = [5.0, 6.0, 4.5]
    for step, loss in enumerate(losses, start=1):
        counted = spikes.after_step(FinishedStep(step, loss, 3.25, seconds=1.0, is_logged=False))
    assert position.spikes == 3 and counted == {"train/spikes": 3.0}
    assert len(said) == 1
    assert "step 41: loss 5.000, but the last 40 had a median of 2.0" in said[0] and "norm 3.25" in said[0]


def test_a_run_that_goes_on_counts_on_and_compares_with_what_was_before() -> None:
    said: list[str] = []
    position = Position()
    for step, loss in enumerate([*noisy(HISTORY_STEPS), 9.0, float("nan")], start=1):
        position.spikes += SpikeDetector(said.append, position).check(step, loss, 1.0)
    assert position.spikes == 1 and len(position.latest_losses) == HISTORY_STEPS
    again = Position.from_dict(json.loads(json.dumps(position.to_dict(), allow_nan=False)))
    assert SpikeDetector(said.append, again).check(HISTORY_STEPS + 3, 8.0, 1.0)
    assert again.spikes == 1 and f"step {HISTORY_STEPS + 3}: loss 8.000, but the last {HISTORY_STEPS}" in said[1]


@pytest.mark.parametrize(
    "losses",
    [
        noisy(2 * HISTORY_STEPS),
        [9.0] * (MIN_HISTORY - 1) + [90.0],
        [4.0 * 0.99**step for step in range(300)],
        [1e-4] * 50,
    ],
    ids=["noise", "the first steps", "falling", "flat"],
)
def test_what_is_no_spike(losses: list[float]) -> None:
    spikes = SpikeDetector(pytest.fail, Position())
    for step, loss in enumerate(losses, start=1):
        assert not spikes.check(step, loss, 1.0)


def watch(said: list[str], ranks: int = 4) -> StragglerWatch:
    found = StragglerWatch(Ranks(0, ranks, 0), torch.device("cpu"), said.append)
    found._hosts = [f"gpu-{rank}" for rank in range(ranks)]
    return found


def test_a_rank_that_is_slow_again_and_again_is_named_once() -> None:
    said: list[str] = []
    stragglers = watch(said)
    for window in range(1, MIN_SLOW_WINDOWS + 3):
        stragglers.report_slow_ranks(window * WINDOW_STEPS, [0.100, 0.130, 0.101, 0.099])
    assert len(said) == 1
    assert (
        f"step {MIN_SLOW_WINDOWS * WINDOW_STEPS}: rank 1 on gpu-1 is slow: its own work takes 130.0 ms per step"
        in said[0]
    )


def test_now_and_then_is_nobody_slow() -> None:
    said: list[str] = []
    stragglers = watch(said)
    for window in range(1, 30):
        times = [0.1] * 4
        times[window % 4] = 0.2
        stragglers.report_slow_ranks(window * WINDOW_STEPS, times)
        stragglers.report_slow_ranks(window * WINDOW_STEPS, [0.0001, 0.0002, 0.0001, 0.0001])
    assert said == []


def test_own_time_is_that_of_the_block() -> None:
    stragglers = watch([])
    for _ in range(2):
        with stragglers.time_own_work():
            time.sleep(0.02)
    assert 0.04 <= stragglers._take_own_seconds() < 1.0
    assert stragglers._take_own_seconds() == 0.0
