"""LoRA operators for 8-bit base weights: frozen matmuls of 8-bit weights and inputs, adapters in a 16-bit type.

Legend: T tokens (leading dimensions flattened), I in, O out, R rank. W_q[O,I] e4m3 (FP8, stored as uint8 so that casts
do not treat it as a float) or int8, v[O] one scale per row: W = v W_q. x is quantized per token.

    forward   y  = t (x_q W_q^T) v + h B^T + bias         (x_q, t)  = quantized rows of x
    backward  dX = u (g_q W_q) + m*(dh A)                 (g_q, u)  = quantized rows of v dY

In dX the scale v varies along the summed dimension, so it is multiplied into dY before quantization. The projections of
a group share u and one matmul over all their outputs. h, dh, dA and dB are computed from unquantized x and dY. The
tensors saved for the backward are the same as in ops/lora.py; x_q is freed when the call returns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ops import derivative, lora, reference
from ops.scaled import check_weights

STORAGE = {"fp8": torch.uint8, "int8": torch.int8}
"""Storage type of each kind of 8-bit weight."""


@dataclass(frozen=True)
class EightBitWeight:
    """A frozen weight: W_q[O,I] in uint8 (e4m3) or int8, and a float32 scale per row, v[O]."""

    values: Tensor
    row_scale: Tensor


def reference_quantize_rows(
    parts: Sequence[Tensor], factors: Sequence[Tensor], storage: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scale the parts [T, O_i] by factors [O_i] if given, concatenate them, and quantize the rows, in plain torch."""
    rows = [part.reshape(-1, part.shape[-1]).float() for part in parts]
    if factors:
        rows = [row * factor for row, factor in zip(rows, factors, strict=True)]
    return reference.quantize_rows(torch.cat(rows, dim=1), storage)


def reference_product(
    q: Tensor, scale: Tensor, right: Tensor, column_scale: Tensor | None, fast: bool = True
) -> Tensor:
    """Compute y[T,N] = scale (q[T,K] right[N,K]^T) column_scale in bf16, in plain torch; `fast` only affects GPUs."""
    return reference.compute_8bit_product(q, scale, right.t(), column_scale).to(torch.bfloat16)


def reference_linear(x: Tensor, weight: Tensor, row_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Compute y[..., O] = t (x_q W_q^T) v + bias in plain torch."""
    check_weights(x, [weight], [row_scale])
    q, scale = reference_quantize_rows([x], [], weight.dtype)
    y = reference.compute_8bit_product(q, scale, weight.t(), row_scale)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def reference_linear_backward(
    grads: Sequence[Tensor], weights: Sequence[Tensor], row_scales: Sequence[Tensor]
) -> Tensor:
    """Compute dX[..., I] = u (g_q W_q), summed over the group, in plain torch."""
    q, scale = reference_quantize_rows(grads, row_scales, weights[0].dtype)
    grad_x = reference.compute_8bit_product(q, scale, torch.cat(list(weights)), None)
    return grad_x.to(grads[0].dtype).reshape(*grads[0].shape[:-1], weights[0].shape[1])


def _forward(op: Any, h: Tensor) -> list[Tensor]:
    q, scale = reference_quantize_rows([op.x], [], op.weights[0].dtype)
    pairs = zip(op.weights, op.row_scales, strict=True)
    products = [reference.compute_8bit_product(q, scale, weight.t(), row_scale) for weight, row_scale in pairs]
    return lora.add_adapters(op, h, products)


def _backward(op: Any) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    grad_x = op.x.new_zeros(op.x.numel() // op.x.shape[-1], op.x.shape[-1], dtype=torch.float32)
    factors = lora.compute_adapter_gradients(op, grad_x, [None] * len(op.grads))
    q, row_scale = reference_quantize_rows(op.grads, op.row_scales, op.weights[0].dtype)
    grad_x += reference.compute_8bit_product(q, row_scale, torch.cat(list(op.weights)), None)
    return grad_x.to(op.x.dtype).view(op.x.shape), *factors


def _quantize_rows_meta(
    parts: Sequence[Tensor], factors: Sequence[Tensor], storage: torch.dtype
) -> tuple[Tensor, Tensor]:
    rows, width = parts[0].numel() // parts[0].shape[-1], sum(part.shape[-1] for part in parts)
    return parts[0].new_empty((rows, width), dtype=storage), parts[0].new_empty(rows, dtype=torch.float32)


def _fake_linear(x: Tensor, weight: Tensor, row_scale: Tensor, bias: Tensor | None) -> Tensor:
    check_weights(x, [weight], [row_scale])
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _save_for_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight, row_scale, _ = inputs
    ctx.save_for_backward(weight, row_scale)


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
    weight, row_scale = ctx.saved_tensors
    need_x, _, _, need_bias = ctx.needs_input_grad
    grad_x = torch.ops.zerolora.eight_bit_linear_backward([grad], [weight], [row_scale]) if need_x else None
    return grad_x, None, None, grad.reshape(-1, grad.shape[-1]).sum(0) if need_bias else None


derivative.define(
    "quantize_rows(Tensor[] parts, Tensor[] factors, ScalarType storage) -> (Tensor q, Tensor scale)",
    reference_quantize_rows, _quantize_rows_meta,
)  # fmt: skip
derivative.define(
    "eight_bit_product(Tensor q, Tensor scale, Tensor right, Tensor? column_scale, bool fast=True) -> Tensor",
    reference_product,
    lambda q, scale, right, *_: q.new_empty((q.shape[0], right.shape[0]), dtype=torch.bfloat16),
)  # fmt: skip
_LINEAR = derivative.define(
    "eight_bit_linear(Tensor x, Tensor weight, Tensor row_scale, Tensor? bias) -> Tensor",
    reference_linear, _fake_linear,
)  # fmt: skip
derivative.define(
    "eight_bit_linear_backward(Tensor[] grads, Tensor[] weights, Tensor[] row_scales) -> Tensor",
    reference_linear_backward,
    lambda grads, weights, _: grads[0].new_empty((*grads[0].shape[:-1], weights[0].shape[1])),
)  # fmt: skip
torch.library.register_autograd("zerolora::eight_bit_linear", _linear_backward, setup_context=_save_for_linear)
torch.library.register_autograd("zerolora::eight_bit_linear_backward", derivative.reject_second_derivative)
eight_bit_group = lora.FormatOperators(
    "eight_bit",
    "Tensor[] weights, Tensor[] row_scales",
    pack=lambda x, weights: ([weight.values for weight in weights], [weight.row_scale for weight in weights]),
    outs=lambda op: [weight.shape[0] for weight in op.weights],
    check=lambda op: check_weights(op.x, op.weights, op.row_scales),
    forward=_forward,
    backward=_backward,
)


def quantize_rows(values: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Quantize values[N,K] to `kind`, fp8 or int8, with one scale per row; return W_q[N,K] and scale[N].

    scale = max(largest magnitude / c, 2^-100) with c = 448 for fp8 (e4m3) and 127 for int8; a NaN makes the scale NaN.
    """
    return torch.ops.zerolora.quantize_rows([values], [], STORAGE[kind])


def eight_bit_linear(x: Tensor, weight: EightBitWeight, bias: Tensor | None) -> Tensor:
    """Compute y = t (x_q W_q^T) v + bias for a frozen weight without an adapter; dX = u (g_q W_q)."""
    return _LINEAR(x, weight.values, weight.row_scale, bias)
