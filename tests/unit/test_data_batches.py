"""Packing, and the batches of an optimizer step: targets, positions, padding, an order that no rank count changes."""

import json
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pyarrow
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.config import UserError
from trainer.data.batches import (
    IGNORE_INDEX,
    Batches,
    MicroBatch,
    StreamBatches,
    collate_samples,
    iterate_evaluation_batches,
    merge_batches,
)
from trainer.data.grouping import pack_best_fit
from trainer.data.samples import Sample, Samples, SampleStream, join_samples
from trainer.data.step_count import compute_steps_per_epoch

PAD = 0


def document(number: int, length: int, trained_from: int = 1) -> Sample:
    """Tokens that name their document: 100 * number + position."""
    return Sample([100 * number + at for at in range(length)], [at >= trained_from for at in range(length)], [length])


def stored(documents: list[Sample], groups: list[list[int]] | None = None) -> Samples:
    table = pyarrow.table(
        {"input_ids": [one.input_ids for one in documents], "trained": [one.loss_weights for one in documents]}
        | {"weights": pyarrow.array([[] for _ in documents], pyarrow.list_(pyarrow.float32()))}
        | {"rejected": [0 for _ in documents], "images": [None for _ in documents]}
    )
    groups = groups or [[index] for index in range(len(documents))]
    starts = np.cumsum([0] + [len(group) for group in groups])
    packed = any(len(group) > 1 for group in groups)
    return Samples(table, starts, np.array([member for group in groups for member in group]), packed=packed)


def batches(samples: Samples, **changes: Any) -> Batches:
    settings = {"batch_size": 1, "accumulation": 1, "rank": 0, "world_size": 1, "seed": 0, "shuffle": True}
    return Batches(samples, pad_token_id=PAD, flat=False, **(settings | changes))


def documents_of(batch: MicroBatch) -> list[int]:
    """Numbers of the documents in the rows of an unpacked batch, dummies left out."""
    return [int(row[0]) // 100 for row in batch.input_ids if int(row[0]) != PAD]


def test_best_fit_by_hand() -> None:
    assert pack_best_fit([6, 3, 4, 7, 5, 5], 10) == [[0, 2], [1, 3], [4, 5]]
    assert pack_best_fit([6, 8, 2], 10) == [
        [0],
        [1, 2],
    ]  # 2 goes where it fits best, not first or where there is most room
    assert pack_best_fit([], 10) == []
    with pytest.raises(ValueError, match="document of 11 tokens exceeds the capacity 10"):
        pack_best_fit([3, 11], 10)


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_against_a_search_of_all_packs(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 50) for _ in range(300)]
    packs = pack_best_fit(lengths, 64)
    assert sorted(index for pack in packs for index in pack) == list(range(300))
    assert all(sum(lengths[index] for index in pack) <= 64 for pack in packs)
    assert [pack[0] for pack in packs] == sorted(pack[0] for pack in packs)
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else 64) - length)
    assert sorted(64 - sum(lengths[index] for index in pack) for pack in packs) == sorted(rooms)


def test_a_padded_batch() -> None:
    batch = collate_samples([document(1, 3, trained_from=2), document(2, 2)], PAD, packed=False, flat=False)
    assert batch.input_ids.tolist() == [[100, 101, 102], [200, 201, PAD]]
    assert batch.targets.tolist() == [[IGNORE_INDEX, 102, IGNORE_INDEX], [201, IGNORE_INDEX, IGNORE_INDEX]]
    assert batch.attention_mask is not None and batch.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert (batch.tokens, batch.target_count) == (5, 2)
    assert (batch.position_ids, batch.cu_seqlens) == (None, None)
    assert batch.input_ids.dtype == batch.targets.dtype == batch.attention_mask.dtype == torch.int64


def test_a_packed_batch_keeps_documents_apart() -> None:
    first = join_samples([document(1, 3, trained_from=0), document(2, 2, trained_from=0)])
    batch = collate_samples([first, document(3, 2)], PAD, packed=True, flat=False)
    assert batch.input_ids.tolist() == [[100, 101, 102, 200, 201], [300, 301, PAD, PAD, PAD]]
    # 200 is trained, and nobody's target: what stands before it is another document.
    assert batch.targets.tolist() == [
        [101, 102, IGNORE_INDEX, 201, IGNORE_INDEX],
        [301, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX],
    ]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]
    assert batch.tokens == 7 and (batch.attention_mask, batch.cu_seqlens) == (None, None)


@pytest.mark.parametrize("packed", [True, False])
def test_a_flat_batch_has_no_padding(packed: bool) -> None:
    rows = [join_samples([document(1, 3), document(2, 2)]), document(3, 2)]
    batch = collate_samples(rows, PAD, packed=packed, flat=True)
    assert batch.input_ids.tolist() == [[100, 101, 102, 200, 201, 300, 301]]
    assert batch.targets.tolist() == [[101, 102, IGNORE_INDEX, 201, IGNORE_INDEX, 301, IGNORE_INDEX]]
    assert batch.position_ids is not None and batch.cu_seqlens is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 7] and batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == 3 and type(batch.max_seqlen) is int
    assert batch.tokens == 7


@pytest.mark.parametrize(("packed", "flat"), [(False, False), (True, False), (True, True)])
def test_a_dummy_has_no_targets(packed: bool, flat: bool) -> None:
    batch = collate_samples([], PAD, packed=packed, flat=flat)
    assert batch.input_ids.shape[0] == 1 and set(batch.input_ids.flatten().tolist()) == {PAD}
    assert set(batch.targets.flatten().tolist()) == {IGNORE_INDEX}
    assert batch.tokens == 0


def test_a_document_has_the_same_loss_alone_and_packed() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()

    def losses(batch: MicroBatch) -> torch.Tensor:
        what = {"attention_mask": batch.attention_mask, "position_ids": batch.position_ids}
        logits = model(batch.input_ids, **what, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")

    parts = [document(1, 7), document(2, 5), document(3, 9)]
    with torch.no_grad():
        alone = [losses(collate_samples([part], PAD, packed=False, flat=False)) for part in parts]
        packed = losses(collate_samples([join_samples(parts[:2]), parts[2]], PAD, packed=True, flat=False))
    expected = torch.cat([alone[0], alone[1], alone[2], torch.zeros(3)])
    torch.testing.assert_close(packed, expected, rtol=5e-7, atol=0)  # in 32 bits, products of other shapes
    assert (expected[:6] > 0.1).all()


@pytest.mark.parametrize("count", [16, 19, 8, 3])
def test_every_rank_count_takes_the_same_samples_in_the_same_steps(count: int) -> None:
    samples = stored([document(number + 1, 2 + number % 5) for number in range(count)])
    steps: dict[tuple[int, int], list[list[list[int]]]] = {}
    for world_size, accumulation in ((1, 4), (2, 2), (4, 1)):
        ranks = [
            batches(samples, batch_size=2, accumulation=accumulation, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        offset, found = 0, []
        for _ in range(compute_steps_per_epoch(len(ranks[0].samples), ranks[0].global_batch_size)):
            parts = [rank.build_step_batches(3, offset) for rank in ranks]
            assert {len(micro) for micro, _ in parts} == {accumulation}
            assert len({consumed for _, consumed in parts}) == 1
            # Micro-step by micro-step, rank by rank: slices of the global batch in order.
            found.append([documents_of(micro[at]) for at in range(accumulation) for micro, _ in parts])
            offset += parts[0][1]
        assert offset == count
        steps[world_size, accumulation] = found
    assert steps[1, 4] == steps[2, 2] == steps[4, 1]
    order = [number for step in steps[1, 4] for part in step for number in part]
    assert sorted(order) == list(range(1, count + 1)) and order != sorted(order)


def test_the_last_step_is_kept_and_filled_with_dummies() -> None:
    samples = stored([document(number, 3) for number in range(1, 6)])
    ranks = [batches(samples, accumulation=2, rank=rank, world_size=2, shuffle=False) for rank in range(2)]
    assert compute_steps_per_epoch(len(ranks[0].samples), 4) == 2 and ranks[0].global_batch_size == 4
    (first, second), (other_first, other_second) = (rank.build_step_batches(0, 4)[0] for rank in ranks)
    assert ranks[0].build_step_batches(0, 4)[1] == ranks[1].build_step_batches(0, 4)[1] == 1
    assert first.input_ids.tolist() == [[500, 501, 502]]
    for dummy in (second, other_first, other_second):
        assert set(dummy.targets.flatten().tolist()) == {IGNORE_INDEX}


def test_order_depends_on_seed_and_epoch_only() -> None:
    samples = stored([document(number, 3) for number in range(1, 40)])
    asked: dict[str, tuple[dict[str, Any], int]] = {
        "first": ({}, 0),
        "again": ({"rank": 1, "world_size": 3, "accumulation": 5}, 0),
        "next epoch": ({}, 1),
        "other seed": ({"seed": 1}, 0),
        "unshuffled": ({"shuffle": False}, 5),
    }
    orders = {name: batches(samples, **settings).get_order(epoch).tolist() for name, (settings, epoch) in asked.items()}
    assert orders["first"] == orders["again"]
    assert orders["unshuffled"] == list(range(39))
    assert len({tuple(order) for order in orders.values()}) == 4
    one = batches(samples)
    one.get_order(1)
    assert one.get_order(0).tolist() == orders["first"]  # going back, as a resumed run may


def test_packs_are_joined_from_their_documents() -> None:
    samples = stored([document(number, 3) for number in range(4)], [[2, 0], [3], [1, 1]])
    assert [sample.document_lengths for sample in samples] == [[3, 3], [3], [3, 3]]
    assert samples[0].input_ids == [200, 201, 202, 0, 1, 2] and samples[2].input_ids[3:] == [100, 101, 102]
    assert len(samples) == 3
    for wrong in (3, -1):
        with pytest.raises(IndexError):
            samples[wrong]


@pytest.mark.parametrize(("count", "world_size"), [(7, 2), (8, 2), (1, 4), (9, 4)])
def test_evaluation_gives_every_rank_the_same_number_of_batches(count: int, world_size: int) -> None:
    samples = stored([document(number, 2 + number % 3) for number in range(1, count + 1)])
    ranks = [
        list(
            iterate_evaluation_batches(
                samples, batch_size=2, rank=rank, world_size=world_size, pad_token_id=PAD, flat=False
            )
        )
        for rank in range(world_size)
    ]
    assert {len(rank) for rank in ranks} == {-(-count // (2 * world_size))}
    assert [number for step in zip(*ranks, strict=True) for batch in step for number in documents_of(batch)] == list(
        range(1, count + 1)
    )


class Counted:
    """A pass over documents 1 to `count`, 101 to 100 + `count` and so on."""

    made: ClassVar[list[int]] = []

    def __init__(self, count: int, epoch: int, state: dict[str, Any] | None) -> None:
        self.count, self.epoch, self.at = count, epoch, state["at"] if state else 0

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        if self.at == self.count:
            raise StopIteration
        self.at += 1
        self.made.append(self.at + 100 * self.epoch)
        return document(self.made[-1], 3)

    @property
    def skipped(self) -> dict[str, int]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}


def stream(count: int) -> SampleStream:
    return SampleStream(lambda epoch, state, rank, gather: Counted(count, epoch, state), packed=False)


def stream_batches(count: int, **changes: Any) -> StreamBatches:
    settings = {"batch_size": 1, "accumulation": 1, "rank": 0, "world_size": 1}
    return StreamBatches(stream(count), pad_token_id=PAD, flat=False, **(settings | changes))


def test_a_stream_is_shared_out_as_memory_is() -> None:
    samples = stored([document(number, 3) for number in range(1, 17)])
    for rank in range(2):
        settings = {"batch_size": 2, "accumulation": 2, "rank": rank, "world_size": 2}
        from_memory, from_stream = batches(samples, shuffle=False, **settings), stream_batches(16, **settings)
        for offset in (0, 8):
            (expected, consumed), (found, also) = (
                from_memory.build_step_batches(0, offset),
                from_stream.build_step_batches(0, offset),
            )
            assert consumed == also == 8
            assert [documents_of(batch) for batch in found] == [documents_of(batch) for batch in expected]


def test_a_stream_goes_on_after_its_end_and_from_any_offset() -> None:
    running = stream_batches(5, batch_size=2)
    found = [documents_of(running.build_step_batches(0, offset)[0][0]) for offset in (0, 2, 4, 6)]
    assert found == [[1, 2], [3, 4], [5, 101], [102, 103]]
    resumed = stream_batches(5, batch_size=2)
    assert documents_of(resumed.build_step_batches(0, 4)[0][0]) == [5, 101]
    assert documents_of(resumed.build_step_batches(0, 6)[0][0]) == [102, 103]
    assert documents_of(resumed.build_step_batches(0, 0)[0][0]) == [1, 2]


def test_a_repeated_step_and_a_resumed_stream_read_nothing_twice_but_that_step() -> None:
    running = stream_batches(5, batch_size=2)
    for offset in (0, 2, 4):
        running.build_step_batches(0, offset)
    state = json.loads(json.dumps(running.state_dict()))
    Counted.made.clear()
    assert documents_of(running.build_step_batches(0, 4)[0][0]) == [5, 101] == Counted.made
    resumed = stream_batches(5, batch_size=1, accumulation=2)
    resumed.load_state_dict(state)
    Counted.made.clear()
    assert [documents_of(batch)[0] for batch in resumed.build_step_batches(0, 6)[0]] == [102, 103] == Counted.made
    assert documents_of(resumed.build_step_batches(0, 0)[0][0]) == [1]  # another offset than the state's is read up to


def test_a_stream_without_samples_is_refused() -> None:
    with pytest.raises(UserError, match=r"dataset.streaming=true: the stream has no record to train on"):
        stream_batches(0).build_step_batches(0, 0)


@pytest.mark.parametrize("layout", ["rows", "packs", "flat"])
def test_merged_batches_are_those_of_all_rows_together(layout: str) -> None:
    """Padding of packs is a document of its own in both, of one token or of several."""
    draw = np.random.default_rng(0)

    def sample(*lengths: int) -> Sample:
        tokens = int(sum(lengths))
        weights = draw.choice([0.0, 0.5, 1.0], tokens).tolist()
        return Sample(draw.integers(3, 50, tokens).tolist(), weights, list(lengths))

    several = layout != "rows"
    groups = [[sample(5, 3) if several else sample(8)], [sample(4), sample(2, 9) if several else sample(11)]]
    options: dict[str, Any] = {"packed": several, "flat": layout == "flat"}
    merged = merge_batches([collate_samples(rows, 0, **options) for rows in groups], 0)
    expected = collate_samples([row for rows in groups for row in rows], 0, **options)
    for name in ("input_ids", "targets", "attention_mask", "unpadded", "cu_seqlens", "weights"):
        found, wanted = getattr(merged, name), getattr(expected, name)
        assert (found is None) == (wanted is None), name
        assert found is None or torch.equal(found, wanted), name
    assert (merged.tokens, merged.max_seqlen) == (expected.tokens, expected.max_seqlen)
    if several:
        assert merged.position_ids is not None and expected.position_ids is not None
        kept = expected.unpadded if expected.unpadded is not None else torch.ones_like(expected.input_ids)
        assert torch.equal(merged.position_ids * kept, expected.position_ids * kept)
