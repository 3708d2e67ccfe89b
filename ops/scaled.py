"""LoRA operators for 8-bit base weights that are dequantized for each matmul, which runs in a 16-bit type.

Legend: T tokens, I in, O out, R rank. q[O,I] e4m3 (uint8) or int8 values, scales[ceil(O/b), ceil(I/c)] one float32 per
block of b x c: W = scale q. Formulas: ops/reference.py with this W; inputs are not quantized.

This path is for checkpoints with a scale per block (128 x 128 in DeepSeek-V3 and Qwen3-FP8), for which there is no
8-bit matmul here, and for any 8-bit base model if exact matmuls are requested. A dequantized weight's memory returns to
torch's allocator once its matmul is queued, and the next weight reuses it. The 8-bit Parameter itself and its scales
are saved for the backward, so ZeRO-3 may free and gather it in between. Matmuls are computed as in
`zerolora::lora_forward` on every device.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ops import lora, reference


@dataclass(frozen=True)
class ScaledWeight:
    """A frozen weight: q[O,I] in uint8 (e4m3) or int8, and a float32 scale per block of `block` = (rows, columns)."""

    values: Tensor
    scales: Tensor
    block: tuple[int, int]


def check_weights(
    x: Tensor, values: Sequence[Tensor], scales: Sequence[Tensor], block: Sequence[int] | None = None
) -> None:
    """Raise ValueError unless 8-bit weights match x and have a scale for each block (without `block`, for each row)."""
    for value, scale in zip(values, scales, strict=True):
        if value.dim() != 2 or value.shape[1] != x.shape[-1]:
            raise ValueError(
                f"8-bit weight {tuple(value.shape)} for x {tuple(x.shape)}: expected [O, {x.shape[-1]}]; under ZeRO-3"
                " gather the parameter first"
            )
        if value.dtype not in (torch.uint8, torch.int8) or value.dtype != values[0].dtype:
            kinds = ", ".join(sorted({str(value.dtype) for value in values}))
            raise ValueError(f"8-bit weights of type {kinds}: expected all uint8 (e4m3) or all int8")
        grid = value.shape[:1] if block is None else (-(-value.shape[0] // block[0]), -(-value.shape[1] // block[1]))
        if tuple(scale.shape) != tuple(grid) or scale.dtype != torch.float32:
            each = "row" if block is None else f"{block[0]} x {block[1]} block"
            raise ValueError(
                f"scales per {each} for weight of shape {tuple(value.shape)}: got shape {tuple(scale.shape)} and dtype"
                f" {scale.dtype}, expected {tuple(grid)} and torch.float32"
            )
        if not value.device == scale.device == x.device:
            raise ValueError(
                f"8-bit weight on {value.device}, its scales on {scale.device}, x on {x.device}: move them together"
            )


def build_dequantizing_group(
    name: str, weights: str, *, dense: Callable[[Any, int], Tensor], **functions: Any
) -> lora.FormatOperators:
    """Return operators that compute `lora.lora_group` for weights that `dense` dequantizes one at a time.

    `dense` receives the operator's arguments and the index of a weight. For `functions`, see `lora.FormatOperators`.
    """

    def split_by_weight(op: Any, h: Tensor) -> Iterator[tuple[slice, list[Tensor], Tensor]]:
        """Yield each weight's slice of the group, the dequantized weight, and its columns of h."""
        begin = 0
        for index, down in enumerate(op.downs):
            end = begin + lora.compute_h_width(down.shape[0])
            yield slice(index, index + 1), [dense(op, index)], h[:, begin:end].contiguous()
            begin = end

    def forward(op: Any, h: Tensor) -> list[Tensor]:
        ys: list[Tensor] = []
        for index, weight, h_columns in split_by_weight(op, h):
            adapter = op.downs[index], op.ups[index], op.scales[index], op.p, op.seed
            ys += torch.ops.zerolora.lora_forward(op.x, weight, op.biases[index], *adapter, h_columns)[0]
        return ys

    def backward(op: Any) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        grad_x, grad_downs, grad_ups = op.x.new_empty(0), [], []
        needs = op.need_x, op.need_down, op.need_up
        for index, weight, h_columns in split_by_weight(op, op.h):
            adapter = op.downs[index], op.ups[index], h_columns, op.scales[index], op.p, op.seed
            part, downs, ups = torch.ops.zerolora.lora_backward(op.grads[index], op.x, weight, *adapter, *needs)
            grad_x = part if not grad_x.numel() else grad_x.add_(part)
            grad_downs += downs
            grad_ups += ups
        return grad_x, grad_downs, grad_ups

    devices = ("cpu", "cuda")
    return lora.FormatOperators(name, weights, forward=forward, backward=backward, devices=devices, **functions)


def _pack_arguments(x: Tensor, weights: Sequence[ScaledWeight]) -> tuple[Any, ...]:
    """Return the operator's arguments. Raises ValueError if block sizes differ."""
    if any(weight.block != weights[0].block for weight in weights):
        raise ValueError(f"different block sizes {sorted({weight.block for weight in weights})}: expected one size")
    return [weight.values for weight in weights], [weight.scales for weight in weights], weights[0].block


scaled_group = build_dequantizing_group(
    "scaled",
    "Tensor[] values, Tensor[] block_scales, int[] block",
    pack=_pack_arguments,
    outs=lambda op: [each.shape[0] for each in op.values],
    check=lambda op: check_weights(op.x, op.values, op.block_scales, op.block),
    dense=lambda op, i: reference.dequantize_blocks(op.values[i], op.block_scales[i], op.block, op.x.dtype),
)


class _FrozenMatmul(torch.autograd.Function):
    """Computes y = x W^T with W dequantized on the fly, and again for dX = dY W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dense: Callable[..., Tensor], *stored: Tensor) -> Tensor:
        ctx.save_for_backward(*stored)
        ctx.dense = dense
        return torch.nn.functional.linear(x, dense(*(tensor.data for tensor in stored), dtype=x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        stored = [tensor.data for tensor in ctx.saved_tensors]  # only once: checkpointing rejects a second read
        none = (None,) * len(stored)
        if not ctx.needs_input_grad[0]:
            return None, None, *none
        return grads[0].matmul(ctx.dense(*stored, dtype=grads[0].dtype)), None, *none


def frozen_linear(x: Tensor, dense: Callable[..., Tensor], stored: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """Compute y = x W^T + bias for a frozen W = dense(*stored, dtype=...) without an adapter."""
    y: Tensor = _FrozenMatmul.apply(x, dense, *stored)
    return y if bias is None else y + bias.to(y.dtype)


def scaled_linear(x: Tensor, weight: ScaledWeight, bias: Tensor | None) -> Tensor:
    dense = partial(reference.dequantize_blocks, block=weight.block)
    return frozen_linear(x, dense, (weight.values, weight.scales), bias)
