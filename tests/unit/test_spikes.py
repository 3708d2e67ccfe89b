"""What the run reports of losses that jump; the numbers are given."""

import json

import pytest
import torch

from trainer.checkpoint.checkpoint import Position
from trainer.monitor.hooks import FinishedStep
from trainer.monitor.spikes import BEFORE, ENOUGH, SpikeWatch


def noisy(count: int) -> list[float]:
    draw = torch.Generator().manual_seed(0)
    return (2.0 + 0.1 * torch.randn(count, generator=draw)).tolist()


def test_a_loss_far_above_the_last_ones_is_told_once() -> None:
    said: list[str] = []
    position = Position()
    spikes = SpikeWatch(said.append, position)
    losses = noisy(60)
    losses[40:43] = [5.0, 6.0, 4.5]
    for step, loss in enumerate(losses, start=1):
        counted = spikes.after_step(FinishedStep(step, loss, 3.25, seconds=1.0, is_logged=False))
    assert position.spikes == 3 and counted == {"train/spikes": 3.0}
    assert len(said) == 1
    assert "step 41: loss 5.000, where the last 40 had a median of 2.0" in said[0] and "norm 3.25" in said[0]


def test_a_run_that_goes_on_counts_on_and_compares_with_what_was_before() -> None:
    said: list[str] = []
    position = Position()
    for step, loss in enumerate([*noisy(BEFORE), 9.0, float("nan")], start=1):
        position.spikes += SpikeWatch(said.append, position).check(step, loss, 1.0)
    assert position.spikes == 1 and len(position.latest_losses) == BEFORE
    again = Position.from_dict(json.loads(json.dumps(position.to_dict(), allow_nan=False)))
    assert SpikeWatch(said.append, again).check(BEFORE + 3, 8.0, 1.0)
    assert again.spikes == 1 and f"step {BEFORE + 3}: loss 8.000, where the last {BEFORE}" in said[1]


@pytest.mark.parametrize(
    "losses",
    [noisy(2 * BEFORE), [9.0] * (ENOUGH - 1) + [90.0], [4.0 * 0.99**step for step in range(300)], [1e-4] * 50],
    ids=["noise", "the first steps", "falling", "flat"],
)
def test_what_is_no_spike(losses: list[float]) -> None:
    spikes = SpikeWatch(pytest.fail, Position())
    for step, loss in enumerate(losses, start=1):
        assert not spikes.check(step, loss, 1.0)
