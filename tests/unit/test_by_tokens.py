"""Micro-batches by tokens: the same samples on any number of ranks, each once an epoch, and little padding."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.config import UserError, load_config
from trainer.data.batches import Batches, balance_tokens
from trainer.data.samples import Sample


class Ragged:
    """Return samples of log-normal lengths; the first token of each is its number."""

    packed = False

    def __init__(self, count: int) -> None:
        drawn = np.random.default_rng(0).lognormal(5.0, 0.9, count)
        self._lengths = np.clip(drawn, 4, 2048).astype(np.int64)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> Sample:
        length = int(self._lengths[index])
        return Sample([index] * length, [True] * length, [length])

    def count_tokens(self) -> tuple[Any, Any]:
        return self._lengths, self._lengths


def epoch(samples: Any, *, accumulation: int, world_size: int, by_tokens: bool = True) -> list[list[list[Any]]]:
    """[step][rank] -> micro-batches."""
    ranks = [
        Batches(
            samples, batch_size=4, accumulation=accumulation, rank=rank, world_size=world_size, seed=1, shuffle=True,
            pad_token_id=0, flat=False, by_tokens=by_tokens,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    steps, offset = [], 0
    while offset < len(samples):
        made = [batches.build_step_batches(0, offset) for batches in ranks]
        steps.append([micro for micro, _ in made])
        offset += made[0][1]
    return steps


def padding(steps: list[list[list[Any]]]) -> float:
    batches = [batch for ranks in steps for rank in ranks for batch in rank if batch.tokens]
    return 1 - sum(batch.tokens for batch in batches) / sum(batch.input_ids.numel() for batch in batches)


def members(step: list[list[Any]]) -> list[int]:
    rows = [row for rank in step for batch in rank if batch.tokens for row in batch.input_ids]
    return sorted(int(row[0]) for row in rows)


def test_ragged_data_wastes_less_than_a_twentieth() -> None:
    samples = Ragged(4000)
    assert padding(epoch(samples, accumulation=2, world_size=2, by_tokens=False)) > 0.3
    assert padding(epoch(samples, accumulation=2, world_size=2)) < 0.05


def test_every_sample_comes_once_and_to_the_same_step_on_any_number_of_ranks() -> None:
    samples = Ragged(1003)
    one, two = epoch(samples, accumulation=4, world_size=1), epoch(samples, accumulation=2, world_size=2)
    assert [members(step) for step in one] == [members(step) for step in two]
    assert sorted(number for step in one for number in members(step)) == list(range(1003))
    assert {len(members(step)) for step in one[:-1]} == {16} and len(members(one[-1])) == 1003 % 16
    assert all(len(rank) == 2 for step in two for rank in step), "every rank runs the same number of micro-steps"


def test_micro_batches_are_even_and_never_larger_than_of_equally_many_rows() -> None:
    lengths = Ragged(64)._lengths
    parts = balance_tokens(lengths, 16)
    assert sorted(np.concatenate(parts).tolist()) == list(range(64))
    sizes = [len(part) * lengths[part].max() for part in parts if len(part)]
    longest_first = np.sort(lengths)[::-1].reshape(16, 4)
    assert max(sizes) <= max(4 * rows.max() for rows in longest_first)


@pytest.mark.parametrize("other", ["dataset.packing=true", "dataset.streaming=true"])
def test_it_goes_with_neither_packs_nor_streams(tmp_path: Path, other: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("base_model: m\noutput_dir: o\ndataset: {path: d, batching: tokens}\ntraining: {max_steps: 1}\n")
    with pytest.raises(UserError, match=r"dataset\.batching=tokens"):
        load_config(path, [other])
