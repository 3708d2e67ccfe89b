"""Parts of sequences that ranks share: their content, and what is refused."""

from dataclasses import replace

import pytest
import torch

from tests.families import tiny_config
from trainer.config import ModelSection, RunConfig, UserError
from trainer.data.batches import IGNORE_INDEX, SequencePart, collate_samples
from trainer.data.samples import Sample
from trainer.model.base import build_empty_model
from trainer.monitor.mfu import StepFlops
from trainer.parallel.ranks.sequence_group import check_ranks_divisible
from trainer.patches.packed_attention import check_sequence_parallel_support

PAD = 9
PACK = [
    Sample([11, 12, 13, 14, 15, 21, 22], [False, True, True, 0.5, True, False, 2.0], [5, 2]),
    Sample([31, 32, 33], [False, True, True], [3]),
]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_the_parts_make_up_the_whole(size: int) -> None:
    whole = collate_samples(PACK, PAD, packed=True, flat=True)
    parts = [
        collate_samples(PACK, PAD, packed=True, flat=True, sequence=SequencePart(rank, size)) for rank in range(size)
    ]
    padding = -10 % size
    assert {part.input_ids.shape for part in parts} == {(1, (10 + padding) // size)}
    assert torch.cat([part.input_ids for part in parts], 1).tolist() == [whole.input_ids.tolist()[0] + [PAD] * padding]
    targets = torch.cat([part.targets for part in parts], 1)
    assert targets.tolist() == [whole.targets.tolist()[0] + [IGNORE_INDEX] * padding]
    positions = torch.cat([part.position_ids for part in parts if part.position_ids is not None], 1)
    assert whole.position_ids is not None and positions[0, :10].tolist() == whole.position_ids[0].tolist()
    assert whole.weights is not None
    assert torch.equal(torch.cat([part.weights for part in parts if part.weights is not None]), whole.weights)
    assert sum(part.tokens for part in parts) == whole.tokens == 10
    bounds = [0, 5, 7, 10, 10 + padding] if padding else [0, 5, 7, 10]
    assert all(part.cu_seqlens is not None and part.cu_seqlens.tolist() == bounds for part in parts)


def test_the_last_token_of_a_part_predicts_the_first_of_the_next() -> None:
    first, second = (
        collate_samples(PACK, PAD, packed=True, flat=True, sequence=SequencePart(rank, 2)) for rank in (0, 1)
    )
    assert (first.input_ids[0, -1], second.input_ids[0, 0]) == (15, 21), "a document ends here"
    alone = [Sample([11, 12, 13, 14], [True] * 4, [4])]
    first, second = (
        collate_samples(alone, PAD, packed=True, flat=True, sequence=SequencePart(rank, 2)) for rank in (0, 1)
    )
    assert first.targets.tolist() == [[12, 13]] and second.targets.tolist() == [[14, IGNORE_INDEX]]


def test_a_rank_counts_its_fraction_of_the_attention() -> None:
    """Half of the heads see the whole sequence on each of two ranks, whatever positions its own tokens have."""
    flops = StepFlops(build_empty_model(tiny_config("llama"), ModelSection()))
    text = [Sample(list(range(64)), [True] * 64, [64])]
    whole = flops.count([collate_samples(text, PAD, packed=True, flat=True)])
    first, second = (
        flops.count([collate_samples(text, PAD, packed=True, flat=True, sequence=SequencePart(rank, 2))])
        for rank in (0, 1)
    )
    assert first + second == pytest.approx(whole)
    assert first - second == flops.per_target, "the last token has no target"


def test_an_incomplete_group_of_ranks_is_refused() -> None:
    whole = {"base_model": "m", "output_dir": "run", "dataset": {"path": "d.jsonl"}}
    check_ranks_divisible(2, RunConfig.model_validate(whole | {"parallel": {"sequence": 2}}).zero, 4)
    with pytest.raises(UserError, match=r"^parallel.sequence=3: does not divide the 4 ranks of this run; use 1 or"):
        check_ranks_divisible(3, RunConfig.model_validate(whole | {"parallel": {"sequence": 3}}).zero, 4)


@pytest.mark.parametrize(
    ("kind", "size", "problem"),
    [
        ("llama", 3, "has 4 attention heads, not a multiple of 3; use a divisor"),
        ("gpt_oss", 2, "has attention sinks"),
        ("gemma2", 2, "does not support custom attention"),
        ("qwen3_next", 2, "has recurrent or chunked layers"),
        ("jamba", 2, "has recurrent or chunked layers"),
        ("mamba2", 2, "has recurrent or chunked layers"),
        ("lfm2", 2, "has recurrent or chunked layers"),
        ("llama4_text", 2, "has recurrent or chunked layers"),
        ("bloom", 2, "does not support custom attention"),
    ],
)
def test_models_that_cannot_share_sequences_are_refused(kind: str, size: int, problem: str) -> None:
    with pytest.raises(UserError, match=f"^parallel.sequence={size}: .* {problem}"):
        check_sequence_parallel_support(size, build_empty_model(tiny_config(kind), ModelSection()))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3_moe", "gemma3_text", "mistral", "deepseek_v3"])
def test_models_with_plain_attention_share_sequences(kind: str) -> None:
    check_sequence_parallel_support(2, build_empty_model(tiny_config(kind), ModelSection()))


def test_a_part_of_no_sample_is_padding() -> None:
    parts = [collate_samples([], PAD, packed=True, flat=True, sequence=SequencePart(rank, 16)) for rank in range(16)]
    assert {tuple(part.input_ids.shape) for part in parts} == {(1, 1)}
    assert sum(part.target_count + part.tokens for part in parts) == 0
    assert replace(parts[0], sequence=None).max_seqlen == 8
