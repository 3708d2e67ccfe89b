"""Split sequences across the ranks of a group (Ulysses sequence parallelism).

Outside attention, every rank computes one part of each sequence. An all-to-all before attention gives a
rank all tokens for some of the heads; another one after attention gives it all heads for its own tokens.
The backward pass of an exchange is the inverse exchange. Weight gradients are therefore summed over the
ranks, as if the ranks had different samples.

Shapes: B rows, H heads, L tokens in the full sequence, D head size, N ranks in the group.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config import UserError, ZeroSection
from trainer.config.errors import format_count
from trainer.data.batches import SequencePart
from trainer.parallel.ranks.group import Ranks, list_shard_groups


def check_ranks_divisible(size: int, zero: ZeroSection, world_size: int) -> None:
    """Raise UserError if the ranks cannot be divided into sequence groups or, at stage 3, shard groups."""
    if world_size % size:
        divisors = [number for number in range(1, world_size + 1) if world_size % number == 0]
        raise UserError(
            f"parallel.sequence={size}: does not divide the {format_count(world_size, 'rank')} of this run; "
            f"use {' or '.join(map(str, divisors))}, or another number of ranks"
        )
    if zero.stage == 3:
        list_shard_groups(zero.shard_within, [""] * world_size)


def form_sequence_group(ranks: Ranks, size: int) -> SequencePart | None:
    """Create the sequence groups; return this rank's part, or None if `size` is 1. A collective call.

    Consecutive ranks form a group, since they are usually on the same host.
    """
    if size == 1:
        return None
    groups = [dist.new_group(range(first, first + size)) for first in range(0, ranks.world_size, size)]
    return SequencePart(ranks.rank % size, size, groups[ranks.rank // size])


def exchange_for_heads(tensors: Sequence[Tensor], part: SequencePart) -> list[Tensor]:
    """Exchange queries, keys or values of this rank's tokens [B, H, L/N, D] for those of its heads [B, H/N, L, D].

    Heads are repeated if their number is not a multiple of N, which happens only for keys and values.
    """
    parts = []
    for tensor in tensors:
        repeats = part.size // math.gcd(tensor.shape[1], part.size)
        repeated = tensor.repeat_interleave(repeats, 1) if repeats > 1 else tensor
        parts.append(repeated.unflatten(1, (part.size, -1)).movedim(1, 0))
    sizes = [sent[0].numel() for sent in parts]
    received = _AllToAll.apply(torch.cat([sent.flatten(1) for sent in parts], 1), part.group).split(sizes, 1)
    by_rank = [rows.view(sent.shape) for rows, sent in zip(received, parts, strict=True)]
    return [tensor.movedim(0, 2).flatten(2, 3) for tensor in by_rank]


def exchange_for_tokens(tensor: Tensor, part: SequencePart) -> Tensor:
    """Exchange the attention output [B, L, H/N, D] of this rank's heads for [B, L/N, H, D] of its tokens."""
    parts = tensor.unflatten(1, (part.size, -1)).movedim(1, 0)
    return _AllToAll.apply(parts.contiguous(), part.group).movedim(0, 2).flatten(2, 3)


def sum_over_parts(values: Tensor, part: SequencePart) -> Tensor:
    return _SumOverGroup.apply(values, part.group)


class _SumOverGroup(torch.autograd.Function):
    """Sums a tensor over a group; the backward pass sums the gradients over the group."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group, total = group, values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _SumOverGroup.apply(grads[0], ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grads[0].contiguous(), ctx.group), None
