"""LoRA operators on a base that is stored in 8 bits and computed in 16: weights are dequantised for each product.

Legend: T tokens, I in, O out, R rank. q[O,I] holds e4m3 (uint8) or int8 values, scales[ceil(O/b), ceil(I/c)] one
float32 for each block of b x c: W = scale q. Formulas: ops/reference.py with this W; inputs are not quantised.

This path serves checkpoints with a scale per block (128 x 128 in DeepSeek-V3 and Qwen3-FP8), for which there is no
8-bit product here, and every stored 8-bit base with exact products. Weights of a group are dequantised
together up to DENSE_AT_ONCE; that memory returns to torch's allocator when the product is queued, and the next call
reuses it. Saved for the backward pass are the 8-bit Parameter itself and its scales: ZeRO-3 may free and gather it in
between. The products are those of `zerolora::lora_forward`, on every device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ops import derivative, lora, reference
from ops.seeds import draw_seed

DENSE_AT_ONCE = 64 * 2**20
"""Bytes of dequantised weights that share one product."""


@dataclass(frozen=True)
class ScaledWeight:
    """q[O,I] in uint8 (e4m3) or int8 and the scale of each block of `block` = (rows, columns) in float32."""

    values: Tensor
    scales: Tensor
    block: tuple[int, int]


def _check(x: Tensor, values: Sequence[Tensor], scales: Sequence[Tensor], block: Sequence[int]) -> None:
    for value, scale in zip(values, scales, strict=True):
        if value.dim() != 2 or value.shape[1] != x.shape[-1]:
            raise ValueError(
                f"8-bit weight {tuple(value.shape)} for x {tuple(x.shape)}: expected [O, {x.shape[-1]}]; under ZeRO-3"
                " gather the parameter first"
            )
        if value.dtype not in (torch.uint8, torch.int8):
            raise ValueError(f"8-bit weight of type {value.dtype}: expected uint8 (e4m3) or int8")
        grid = (-(-value.shape[0] // block[0]), -(-value.shape[1] // block[1]))
        if tuple(scale.shape) != grid or scale.dtype != torch.float32:
            raise ValueError(
                f"scales {tuple(scale.shape)} of {scale.dtype} for a weight {tuple(value.shape)} in blocks of"
                f" {block[0]} x {block[1]}: expected {grid} of torch.float32"
            )
        if not value.device == scale.device == x.device:
            raise ValueError(f"8-bit weight on {value.device}, its scales on {scale.device}, x on {x.device}")


def _split_by_memory(values: Sequence[Tensor], element: int) -> Iterator[slice]:
    """Yield slices of neighbouring weights that are dequantised together."""
    begin = size = 0
    for index, value in enumerate(values):
        own = value.numel() * element
        if index > begin and size + own > DENSE_AT_ONCE:
            yield slice(begin, index)
            begin, size = index, 0
        size += own
    yield slice(begin, len(values))


def _dense(of: Any, piece: slice) -> list[Tensor]:
    pairs = zip(of.values[piece], of.scales[piece], strict=True)
    return [reference.dequantize_blocks(value, scale, of.block, of.x.dtype) for value, scale in pairs]


def _columns(downs: Sequence[Tensor], piece: slice) -> slice:
    """Return the columns of h that belong to a piece."""
    begin = sum(lora.padded_rank(down.shape[0]) for down in downs[: piece.start])
    return slice(begin, begin + sum(lora.padded_rank(down.shape[0]) for down in downs[piece]))


def forward(*arguments: Any) -> tuple[list[Tensor], Tensor]:
    """Compute `scaled_forward`: y_i = x W_i^T + bias_i + h_i B_i^T, and h for the backward pass."""
    of = ForwardArguments(*arguments)
    _check(of.x, of.values, of.scales, of.block)
    h: Tensor = torch.ops.zerolora.lora_project(of.x, of.downs, of.factors, of.p, of.seed)
    ys: list[Tensor] = []
    for piece in _split_by_memory(of.values, of.x.element_size()):
        rank_part = h[:, _columns(of.downs, piece)].contiguous()
        found, _ = torch.ops.zerolora.lora_forward(
            of.x, _dense(of, piece), of.biases[piece], of.downs[piece], of.ups[piece], of.factors[piece], of.p, of.seed,
            rank_part,
        )  # fmt: skip
        ys += found
    return ys, h


def backward(*arguments: Any) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Compute `scaled_backward`; gradients that are not needed are empty."""
    of = BackwardArguments(*arguments)
    grad_x, grad_downs, grad_ups = of.x.new_empty(0), [], []
    for piece in _split_by_memory(of.values, of.x.element_size()):
        rank_part = of.h[:, _columns(of.downs, piece)].contiguous()
        part, downs, ups = torch.ops.zerolora.lora_backward(
            of.grads[piece], of.x, _dense(of, piece), of.downs[piece], of.ups[piece], rank_part, of.factors[piece],
            of.p, of.seed, of.need_x, of.need_down, of.need_up,
        )  # fmt: skip
        grad_x = part if not grad_x.numel() else grad_x.add_(part)
        grad_downs += downs
        grad_ups += ups
    return grad_x, grad_downs, grad_ups


def _fake_forward(*arguments: Any) -> tuple[list[Tensor], Tensor]:
    of = ForwardArguments(*arguments)
    _check(of.x, of.values, of.scales, of.block)
    return lora.fake_forward(of.x, [each.shape[0] for each in of.values], of.downs, of.ups, of.factors, of.p, None)


def _fake_backward(*arguments: Any) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    of = BackwardArguments(*arguments)
    return lora.fake_backward(of.x, of.downs, of.ups, of.need_x, of.need_down, of.need_up)


_FORWARD = derivative.define(
    "scaled_forward(Tensor x, Tensor[] values, Tensor[] scales, int[] block, Tensor[] biases, Tensor[] downs,"
    " Tensor[] ups, float[] factors, float p, Tensor? seed) -> (Tensor[] ys, Tensor h)",
    forward, _fake_forward, ("cpu", "cuda"),
)  # fmt: skip
derivative.define(
    "scaled_backward(Tensor[] grads, Tensor x, Tensor[] values, Tensor[] scales, int[] block, Tensor[] downs,"
    " Tensor[] ups, Tensor h, float[] factors, float p, Tensor? seed, bool need_x, bool need_down, bool need_up)"
    " -> (Tensor grad_x, Tensor[] grad_downs, Tensor[] grad_ups)",
    backward, _fake_backward, ("cpu", "cuda"),
)  # fmt: skip
ForwardArguments, BackwardArguments = derivative.register("scaled")


class _FrozenProduct(torch.autograd.Function):
    """y = x W^T with W dequantised on the fly, and again for dX = dY W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(values, scales)
        ctx.block = block
        return torch.nn.functional.linear(x, reference.dequantize_blocks(values.data, scales, block, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        values, scales = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        weight = reference.dequantize_blocks(values.data, scales, ctx.block, grads[0].dtype)
        return grads[0].matmul(weight), None, None, None


def scaled_linear(x: Tensor, weight: ScaledWeight, bias: Tensor | None) -> Tensor:
    """Compute y = x W^T + bias for a frozen weight without an adapter; needs no loaded operator."""
    y: Tensor = _FrozenProduct.apply(x, weight.values, weight.scales, weight.block)
    return y if bias is None else y + bias.to(y.dtype)


def scaled_group(
    x: Tensor,
    weights: Sequence[ScaledWeight],
    biases: Sequence[Tensor | None],
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    factors: Sequence[float],
    dropout: float = 0.0,
) -> list[Tensor]:
    """Compute `lora.lora_group` for 8-bit weights that are dequantised; all weights need blocks of one size.

    Raises:
        ValueError: as `lora.lora_group`; a weight that is not gathered; scales that do not fit the blocks.
    """
    if any(weight.block != weights[0].block for weight in weights):
        raise ValueError(f"weights in blocks of {sorted({weight.block for weight in weights})}: expected one size")
    arguments = ForwardArguments(
        x=x,
        values=[weight.values for weight in weights],
        scales=[weight.scales for weight in weights],
        block=weights[0].block,
        biases=lora.fill_biases(x, biases, [weight.values.shape[0] for weight in weights]),
        downs=downs,
        ups=ups,
        factors=factors,
        p=dropout,
        seed=draw_seed(x, dropout),
    )
    ys, _ = _FORWARD(*arguments)
    return ys
