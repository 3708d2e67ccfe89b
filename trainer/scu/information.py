"""Compute DataBPT and ParamBPT (bits per token in the data and in the adapter) at any ZeRO stage, with gradients.

    DataBPT  = sum of token losses (nats) / target tokens / ln 2
    ParamBPT = Q / (2 sigma^2 N ln 2),   Q = sum of w^2
    measure delta:    w = s B A, so Q = s^2 trace((B^T B)(A A^T)), dB = 2 s^2 B (A A^T), dA = 2 s^2 (B^T B) A
    measure factors:  w = all of A and B, dw = 2 w

N: target tokens per epoch; in shapes, the number of adapted layers of that shape. R: rank, I: in, O: out. s: PEFT's
scale, alpha / r or (rsLoRA) alpha / sqrt(r). MoE models: each expert counts as a separate layer.
DoRA: w is the update s B A of the direction before normalization; magnitudes (one number per output) are not counted,
since they are initialized to the norms of the base weight, which is not information in the adapter.
QLoRA: as for LoRA; the 4-bit base is not counted.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.config import UserError
from trainer.model.expert_layers import ExpertFactor
from trainer.parallel.engine.adapter_choice import find_choice
from trainer.parallel.engine.flat_adapter import FlatAdapter
from trainer.parallel.engine.partitioned import (
    get_full_shape,
    get_local_shard,
    get_partition_group,
    is_gathered,
    is_partitioned,
)

Measure = Literal["delta", "factors"]
# An nn.Parameter that ZeRO-3 may have partitioned (trainer/parallel/engine/partitioned.py).
Partitionable = Any
# Layers are batched up to this number of elements, for few kernel launches and 64 MiB of working memory in fp32.
CHUNK_ELEMENTS = 2**24
GRAM_PIECES = 16


@dataclass(frozen=True)
class AdapterPair:
    """An adapted layer with the update scale * B A: A [R, I] and B [O, R], or [E, R, I] and [E, O, R] for experts."""

    a: nn.Parameter
    b: nn.Parameter
    scale: float


def find_pairs(model: nn.Module) -> list[AdapterPair]:
    """Return the LoRA pairs, in module order, of the selected adapter or, if none is selected, of the active adapters.

    Raises UserError if there are no pairs, or a factor is not a matrix.
    """
    from peft.tuners.lora import LoraLayer

    pairs: list[AdapterPair] = []
    selected = (choice.selected if (choice := find_choice(model)) else None) or ""
    for path, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        for adapter in [selected] if selected else module.active_adapters:
            if adapter in module.lora_A:
                a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
            elif adapter in module.lora_embedding_A:
                a, b = module.lora_embedding_A[adapter], module.lora_embedding_B[adapter]
            else:
                continue
            if len(get_full_shape(a)) != 2 and not isinstance(module.lora_A[adapter], ExpertFactor):
                raise UserError(
                    f"scu.enabled=true: {path}: factor A {tuple(get_full_shape(a))} is not a matrix; exclude this layer"
                )
            pairs.append(AdapterPair(a, b, float(module.scaling[adapter])))
    if not pairs:
        raise UserError("scu.enabled=true: the model has no LoRA layer to measure; use adapter: lora or qlora")
    return pairs


def compute_data_bpt(loss_sum_global: float, target_tokens_global: float) -> float:
    """Return DataBPT in bits per token, given the sums (nats, tokens) over all ranks and micro-steps."""
    return loss_sum_global / target_tokens_global / math.log(2.0)


class AdapterInformation:
    """Computes Q = sum of w^2 over the adapter with its analytic gradient, and converts it to nats or bits.

    `sigma` is the standard deviation of the prior N(0, sigma^2); `tokens` is N, the number of target tokens per epoch.
    """

    def __init__(
        self, pairs: list[AdapterPair], measure: Measure, *, sigma: float, tokens: int, flat: FlatAdapter | None = None
    ) -> None:
        """Group the pairs; pairs in the buffer of `flat` are read and differentiated without a copy."""
        self.measure = measure
        self.nats_per_square = 1.0 / (2.0 * sigma**2 * tokens)
        self.chunks = list(_build_chunks(pairs, flat))

    def compute_sum_of_squares(self) -> Tensor:
        """Return this rank's differentiable Q; the adapter's Q and its gradient are the means over the ranks.

        Under ZeRO-3 with `factors`, this is Q of this rank's shards times the number of ranks, otherwise Q of the full
        adapter. Every rank must call this method (`delta` gathers partitioned parameters) between a forward pass and
        its backward pass: only then does autograd see the full shape of a partitioned parameter instead of (0,).
        """
        compute = _compute_delta if self.measure == "delta" else _compute_factors
        with torch.no_grad():
            results = [compute(chunk) for chunk in self.chunks]
            value = torch.stack([value for value, *_ in results]).sum()
        gradients = [  # [layers, ...], or [layers, E, ...] for experts
            gradient.view(len(chunk.a), *get_full_shape(chunk.a[0])[:-2], *gradient.shape[1:])
            for chunk, (_, *pair) in zip(self.chunks, results, strict=True)
            for gradient in pair
        ]
        leaves = [chunk.get_leaves() for chunk in self.chunks]
        counts = [
            (chunk.flat is not None, len(side))
            for chunk, sides in zip(self.chunks, leaves, strict=True)
            for side in sides
        ]
        tensors = [tensor for sides in leaves for side in sides for tensor in side]
        return cast(Tensor, _PrecomputedGradient.apply(value, gradients, counts, *tensors))

    def compute_bits(self, squares: float) -> float:
        """Convert Q to ParamBPT in bits per token."""
        return squares * self.nats_per_square / math.log(2.0)

    @torch.no_grad()
    def compute_reachable_bounds(self, max_change_a: float, max_change_b: float) -> tuple[float, float]:
        """Return the lower and upper bounds on Q that training can still reach.

        An element of A moves by at most c_A = `max_change_a`, and one of B by at most c_B = `max_change_b`: the sum of
        the remaining learning rates. factors: an element w contributes between (|w| - c)_+^2 and (|w| + c)^2 to Q.
        delta: an element of s B A moves by at most s ((|B| + c_B)(|A| + c_A) - |B||A|). The norm of these changes is
        added to the current norm of s B A, or subtracted from it.
        """
        low = high = 0.0
        for chunk in self.chunks:
            a_NRI, b_NOR = chunk.stack(_gather_full_parameters)
            if self.measure == "factors":
                for weights, change in ((a_NRI, max_change_a), (b_NOR, max_change_b)):
                    low += float((weights.abs() - change).clamp(min=0).square().sum())
                    high += float((weights.abs() + change).square().sum())
                continue
            a_abs, b_abs = a_NRI.abs(), b_NOR.abs()
            a_far, b_far = a_abs + max_change_a, b_abs + max_change_b
            present_N = _compute_dots(a_NRI, b_NOR, a_NRI, b_NOR).clamp(min=0).sqrt()
            squared_N = _compute_dots(a_far, b_far, a_far, b_far) + _compute_dots(a_abs, b_abs, a_abs, b_abs)
            moved_N = (squared_N - 2 * _compute_dots(a_far, b_far, a_abs, b_abs)).clamp(min=0).sqrt()
            scale_N = chunk.scale_N11.flatten()
            low += float((scale_N * (present_N - moved_N).clamp(min=0)).square().sum())
            high += float((scale_N * (present_N + moved_N)).square().sum())
        return low, high


@dataclass(frozen=True)
class _Chunk:
    a: list[nn.Parameter]
    b: list[nn.Parameter]
    scale_N11: Tensor
    flat: FlatAdapter | None = None
    rows: slice | None = None
    """Rows of A and B in the two blocks of `flat`."""
    blocks: tuple[int, int] = (0, 0)

    def get_leaves(self) -> list[list[Tensor]]:
        """Return the autograd leaves of A and B: the parameters, or the stacks of the current forward pass."""
        if self.flat is None:
            return [list[Tensor](self.a), list[Tensor](self.b)]
        stacks = self.flat.stacks
        return [[stacks[number][self.rows or slice(None)]] if number in stacks else [] for number in self.blocks]

    def stack(self, read: Any) -> tuple[Tensor, Tensor]:
        """Return the stacked A [N, R, I] and B [N, O, R] in at least fp32: bf16 drops updates below 1/256 of a sum."""
        dtype = torch.promote_types(self.a[0].dtype, torch.float32)
        if self.flat is not None:
            down, up = (self.flat.read_block(number)[self.rows or slice(None)] for number in self.blocks)
            return down.flatten(0, -3).to(dtype), up.flatten(0, -3).to(dtype)  # the experts of a layer become layers
        tensors: list[Tensor] = read(self.a + self.b)
        split = len(self.a)
        # cat and view: stack would create a view of each tensor, which is slow for hundreds of small tensors.
        a_NRI = torch.cat(tensors[:split]).view(-1, *get_full_shape(self.a[0])[-2:])
        b_NOR = torch.cat(tensors[split:]).view(-1, *get_full_shape(self.b[0])[-2:])
        return a_NRI.to(dtype), b_NOR.to(dtype)


def _build_chunks(pairs: list[AdapterPair], flat: FlatAdapter | None) -> Iterator[_Chunk]:
    groups: dict[tuple[Any, ...], list[AdapterPair]] = {}
    for pair in pairs:
        kind = (get_full_shape(pair.a), get_full_shape(pair.b), pair.a.dtype, pair.b.dtype, pair.a.device)
        groups.setdefault(kind, []).append(pair)
    for (a_shape, b_shape, dtype, _, device), group in groups.items():
        size = max(1, CHUNK_ELEMENTS // (a_shape.numel() + b_shape.numel()))
        wide = torch.promote_types(dtype, torch.float32)
        for start in range(0, len(group), size):
            part = group[start : start + size]
            scales = [pair.scale for pair in part for _ in range(a_shape[:-2].numel())]
            scale_N11 = torch.tensor(scales, dtype=wide, device=device).view(-1, 1, 1)
            position = _find_flat_position(flat, part) if flat is not None else {}
            yield _Chunk([pair.a for pair in part], [pair.b for pair in part], scale_N11, **position)


def _find_flat_position(flat: FlatAdapter, part: list[AdapterPair]) -> dict[str, Any]:
    """Return the position of `part` in the flat adapter, as arguments to `_Chunk`; empty if it is not contiguous."""
    numbers = [flat.find_rows([getattr(pair, side) for pair in part]) for side in ("a", "b")]
    if None in numbers:
        return {}
    (block_a, rows_a), (block_b, rows_b) = cast(list[tuple[int, slice]], numbers)
    return {"flat": flat, "rows": rows_a, "blocks": (block_a, block_b)} if rows_a == rows_b else {}


class _PrecomputedGradient(torch.autograd.Function):
    """Attaches precomputed gradients to a value, so that ZeRO-3 may repartition A and B at any time."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, gradients: list[Tensor], counts: list[tuple[bool, int]], *tensors: Tensor
    ) -> Tensor:
        """Save the gradients. For each, `counts` has whether its tensors are already one stack, and their number."""
        ctx.save_for_backward(*gradients)
        ctx.counts = counts
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        outputs: list[Tensor | None] = [None, None, None]
        for stacked, (is_stacked, count) in zip(ctx.saved_tensors, ctx.counts, strict=True):
            if count:
                # grad_output includes fp16's loss scale: multiply before narrowing, or small gradients underflow.
                gradient = (stacked * grad_output).to(ctx.dtypes[len(outputs) - 3])
                outputs.extend([gradient] if is_stacked else gradient.unbind())
        return tuple(outputs)


def _compute_delta(chunk: _Chunk) -> tuple[Tensor, Tensor, Tensor]:
    a_NRI, b_NOR = chunk.stack(_gather_full_parameters)
    gram_a_NRR, gram_b_NRR = a_NRI @ a_NRI.mT, _compute_gram(b_NOR)
    square_N11 = chunk.scale_N11.square()
    value = (square_N11 * gram_a_NRR * gram_b_NRR).sum()
    return value, (2 * square_N11 * gram_b_NRR) @ a_NRI, b_NOR @ (2 * square_N11 * gram_a_NRR)


def _compute_gram(b_NOR: Tensor) -> Tensor:
    """Compute B^T B per layer in pieces along O, since a GPU runs a small matmul in a single thread block."""
    layers, rows, rank = b_NOR.shape
    pieces = math.gcd(rows, GRAM_PIECES)
    parts = b_NOR.reshape(layers * pieces, rows // pieces, rank)
    return (parts.mT @ parts).view(layers, pieces, rank, rank).sum(dim=1)


def _compute_factors(chunk: _Chunk) -> tuple[Tensor, Tensor, Tensor]:
    a_NRI, b_NOR = chunk.stack(_mask_to_shard)
    # The engine averages gradients over the ranks, but only one rank contributes each shard.
    weight = _count_partitions(chunk.a[0])
    value = weight * (a_NRI.square().sum() + b_NOR.square().sum())
    return value, 2 * weight * a_NRI, 2 * weight * b_NOR


def _compute_dots(a1: Tensor, b1: Tensor, a2: Tensor, b2: Tensor) -> Tensor:
    """Compute <B1 A1, B2 A2> per layer, [N], without forming an O x I matrix."""
    return ((b1.mT @ b2) * (a1 @ a2.mT)).sum(dim=(1, 2))


def _count_partitions(parameter: Partitionable) -> int:
    return dist.get_world_size(get_partition_group(parameter)) if is_partitioned(parameter) else 1


def _gather_full_parameters(parameters: list[Partitionable]) -> list[Tensor]:
    """Return the full parameters, with a single all-gather of the shards.

    deepspeed.zero.GatheredParameters frees parameters on exit, which breaks the prefetching of the current step;
    reading the shards does not change the state of any parameter.
    """
    partitioned = [parameter for parameter in parameters if not is_gathered(parameter)]
    gathered: dict[int, Tensor] = {}
    if partitioned:
        shards = torch.cat([get_local_shard(p).to(p.device) for p in partitioned])
        ranks = _count_partitions(partitioned[0])
        buffer = shards.new_empty(ranks * shards.numel())
        dist.all_gather_into_tensor(buffer, shards, group=get_partition_group(partitioned[0]))
        columns = buffer.view(ranks, -1).split([get_local_shard(p).numel() for p in partitioned], dim=1)
        for parameter, column in zip(partitioned, columns, strict=True):
            shape = get_full_shape(parameter)
            # The last shards are padded to equal length; the padding follows the elements.
            gathered[id(parameter)] = column.reshape(-1)[: shape.numel()].view(shape)
    return [gathered[id(p)] if id(p) in gathered else p for p in parameters]


def _mask_to_shard(parameters: list[Partitionable]) -> list[Tensor]:
    """Return the parameters with the elements of other ranks' shards set to 0; unchanged if not partitioned."""
    tensors: list[Tensor] = []
    for parameter in parameters:
        if not is_partitioned(parameter):
            tensors.append(parameter)
            continue
        shard, shape = get_local_shard(parameter), get_full_shape(parameter)
        start = dist.get_rank(get_partition_group(parameter)) * shard.numel()
        length = max(0, min(shard.numel(), shape.numel() - start))
        owned = torch.zeros(shape.numel(), dtype=shard.dtype, device=parameter.device)
        if length:
            owned[start : start + length] = shard[:length]
        tensors.append(owned.view(shape))
    return tensors
