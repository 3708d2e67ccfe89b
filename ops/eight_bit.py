"""LoRA operators on an 8-bit base: frozen products of 8-bit weights and 8-bit inputs, the adapter in 16 bits.

Legend: T tokens (leading dimensions flattened), I in, O out, R rank. W_q[O,I] holds e4m3 (FP8, stored as uint8, so that
nothing converts it as if it were a float) or int8, v[O] one scale per row: W = v W_q. x is quantised per token.

    forward   y  = t (x_q W_q^T) v + h B^T + bias         (x_q, t)  = quantised rows of x
    backward  dX = u (g_q W_q) + m*(dh A)                 (g_q, u)  = quantised rows of v dY

In dX the scale v runs along the summed dimension, so it is multiplied into dY before quantisation. The projections of a
group share u and one product over all their outputs. h, dh, dA and dB are computed as in ops/lora.py, from unquantised
x and dY. The same tensors are saved for the backward as in ops/lora.py; x_q is freed when the call returns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ops import derivative, lora, reference
from ops.seeds import draw_seed

_TAGS = (torch.Tag.pt2_compliant_tag,)
STORAGE = {"fp8": torch.uint8, "int8": torch.int8}
"""Storage type of each kind."""

torch.library.define(
    "zerolora::quantize_rows", "(Tensor[] parts, Tensor[] factors, ScalarType storage) -> (Tensor q, Tensor scale)",
    tags=_TAGS,
)  # fmt: skip
torch.library.define(
    "zerolora::eight_bit_product",
    "(Tensor q, Tensor scale, Tensor right, Tensor? column_scale, bool fast=True) -> Tensor",
    tags=_TAGS,
)
torch.library.define(
    "zerolora::eight_bit_linear", "(Tensor x, Tensor weight, Tensor row_scale, Tensor? bias) -> Tensor", tags=_TAGS
)
torch.library.define(
    "zerolora::eight_bit_linear_backward",
    "(Tensor[] grads, Tensor[] weights, Tensor[] row_scales) -> Tensor",
    tags=_TAGS,
)
torch.library.define(
    "zerolora::eight_bit_forward",
    "(Tensor x, Tensor[] weights, Tensor[] row_scales, Tensor[] biases, Tensor[] downs, Tensor[] ups, float[] scales,"
    " float p, Tensor? seed, Tensor? h) -> (Tensor[] ys, Tensor h)",
    tags=_TAGS,
)
torch.library.define(
    "zerolora::eight_bit_backward",
    "(Tensor[] grads, Tensor x, Tensor[] weights, Tensor[] row_scales, Tensor[] downs, Tensor[] ups, Tensor h,"
    " float[] scales, float p, Tensor? seed, bool need_x, bool need_down, bool need_up)"
    " -> (Tensor grad_x, Tensor[] grad_downs, Tensor[] grad_ups)",
    tags=_TAGS,
)


@dataclass(frozen=True)
class EightBitWeight:
    """W_q[O,I] in uint8 (e4m3) or int8 and the scale of each row v[O] in float32."""

    values: Tensor
    row_scale: Tensor


ForwardArguments = derivative.build_arguments_type("eight_bit_forward")
BackwardArguments = derivative.build_arguments_type("eight_bit_backward")


def _check_weights(x: Tensor, weights: Sequence[Tensor], row_scales: Sequence[Tensor]) -> None:
    for weight, scale in zip(weights, row_scales, strict=True):
        if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(
                f"8-bit weight {tuple(weight.shape)} for x {tuple(x.shape)}: expected [O, {x.shape[-1]}]; under ZeRO-3"
                " gather the parameter first"
            )
        if weight.dtype not in STORAGE.values() or weight.dtype != weights[0].dtype:
            kinds = sorted({str(each.dtype) for each in weights})
            raise ValueError(f"8-bit weights of type {', '.join(kinds)}: expected all uint8 (e4m3) or all int8")
        if tuple(scale.shape) != (weight.shape[0],) or scale.dtype != torch.float32:
            raise ValueError(
                f"row_scale {tuple(scale.shape)} of {scale.dtype}: expected ({weight.shape[0]},) of torch.float32"
            )
        if not weight.device == scale.device == x.device:
            raise ValueError(f"8-bit weight on {weight.device}, its scale on {scale.device}, x on {x.device}")


def reference_quantize_rows(
    parts: Sequence[Tensor], factors: Sequence[Tensor], storage: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Plain-torch `quantize_rows` of the parts [T, O_i] concatenated, each times its factors [O_i] if given."""
    rows = [part.reshape(-1, part.shape[-1]).float() for part in parts]
    if factors:
        rows = [row * factor for row, factor in zip(rows, factors, strict=True)]
    return reference.quantize_rows(torch.cat(rows, dim=1), storage)


def reference_product(
    q: Tensor, scale: Tensor, right: Tensor, column_scale: Tensor | None, fast: bool = True
) -> Tensor:
    """Plain-torch `eight_bit_product`: y[T,N] = scale (q right[N,K]^T) column_scale in bf16; `fast` is for GPUs."""
    return reference.eight_bit_product(q, scale, right.t(), column_scale).to(torch.bfloat16)


def reference_linear(x: Tensor, weight: Tensor, row_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Plain-torch `eight_bit_linear`: y[..., O] = t (x_q W_q^T) v + bias."""
    _check_weights(x, [weight], [row_scale])
    q, scale = reference_quantize_rows([x], [], weight.dtype)
    y = reference.eight_bit_product(q, scale, weight.t(), row_scale)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def reference_linear_backward(
    grads: Sequence[Tensor], weights: Sequence[Tensor], row_scales: Sequence[Tensor]
) -> Tensor:
    """Plain-torch `eight_bit_linear_backward`: dX[..., I] = u (g_q W_q), summed over the group."""
    q, scale = reference_quantize_rows(grads, row_scales, weights[0].dtype)
    grad_x = reference.eight_bit_product(q, scale, torch.cat(list(weights)), None)
    return grad_x.to(grads[0].dtype).reshape(*grads[0].shape[:-1], weights[0].shape[1])


def reference_forward(*arguments: Any) -> tuple[list[Tensor], Tensor]:
    """Plain-torch `eight_bit_forward`; the returned h is empty if it was given."""
    of = ForwardArguments(*arguments)
    _check_weights(of.x, of.weights, of.row_scales)
    lora.check_adapters(of.x, [weight.shape[0] for weight in of.weights], of.downs, of.ups, of.scales, of.p)
    if of.h is not None:
        lora.check_h(of.x, of.downs, of.h)
    h = lora.reference_project(of.x, of.downs, of.scales, of.p, of.seed) if of.h is None else of.h
    q, scale = reference_quantize_rows([of.x], [], of.weights[0].dtype)
    ys, begin = [], 0
    for i, (weight, row_scale, up) in enumerate(zip(of.weights, of.row_scales, of.ups, strict=True)):
        y_TO = reference.eight_bit_product(q, scale, weight.t(), row_scale)
        y_TO = y_TO + h[:, begin : begin + up.shape[1]].to(y_TO.dtype) @ up.to(of.x.dtype).to(y_TO.dtype).t()
        if of.biases:
            y_TO = y_TO + of.biases[i].to(y_TO.dtype)
        # Hide the view from autograd: it forbids in-place changes of views among several outputs, which Falcon does.
        ys.append(torch.ops.aten._unsafe_view(y_TO.to(of.x.dtype), [*of.x.shape[:-1], weight.shape[0]]))
        begin += lora.padded_rank(up.shape[1])
    return ys, h if of.h is None else of.x.new_empty((0, 0))


def reference_backward(*arguments: Any) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Plain-torch `eight_bit_backward`; gradients that are not needed are empty."""
    of = BackwardArguments(*arguments)
    mask = lora.draw_mask(of.x, of.p, of.seed)
    x_TI = of.x.reshape(-1, of.x.shape[-1])
    grad_x = torch.zeros(x_TI.shape, dtype=torch.float32, device=of.x.device)
    grad_downs, grad_ups, begin = [], [], 0
    for grad, down, up, scale in zip(of.grads, of.downs, of.ups, of.scales, strict=True):
        grad_TO, h_TR = grad.reshape(-1, grad.shape[-1]), of.h[:, begin : begin + down.shape[0]]
        factors = down.to(of.x.dtype), up.to(of.x.dtype)
        part, grad_down, grad_up = reference.backward(grad_TO, x_TI, None, *factors, h_TR, scale, mask)
        grad_x += part
        grad_downs.append(grad_down.to(down.dtype))
        grad_ups.append(grad_up.to(up.dtype))
        begin += lora.padded_rank(down.shape[0])
    if not of.need_x:
        return of.x.new_empty(0), grad_downs if of.need_down else [], grad_ups if of.need_up else []
    q, row_scale = reference_quantize_rows(of.grads, of.row_scales, of.weights[0].dtype)
    grad_x += reference.eight_bit_product(q, row_scale, torch.cat(list(of.weights)), None)
    whole = grad_x.to(of.x.dtype).view(of.x.shape)
    return whole, grad_downs if of.need_down else [], grad_ups if of.need_up else []


REFERENCE: dict[str, Callable[..., Any]] = {
    "quantize_rows": reference_quantize_rows,
    "eight_bit_product": reference_product,
    "eight_bit_linear": reference_linear,
    "eight_bit_linear_backward": reference_linear_backward,
    "eight_bit_forward": reference_forward,
    "eight_bit_backward": reference_backward,
}


def _fake_quantize_rows(
    parts: Sequence[Tensor], factors: Sequence[Tensor], storage: torch.dtype
) -> tuple[Tensor, Tensor]:
    rows, width = parts[0].numel() // parts[0].shape[-1], sum(part.shape[-1] for part in parts)
    return parts[0].new_empty((rows, width), dtype=storage), parts[0].new_empty(rows, dtype=torch.float32)


def _fake_product(q: Tensor, scale: Tensor, right: Tensor, column_scale: Tensor | None, fast: bool = True) -> Tensor:
    return q.new_empty((q.shape[0], right.shape[0]), dtype=torch.bfloat16)


def _fake_linear(x: Tensor, weight: Tensor, row_scale: Tensor, bias: Tensor | None) -> Tensor:
    _check_weights(x, [weight], [row_scale])
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_linear_backward(grads: Sequence[Tensor], weights: Sequence[Tensor], row_scales: Sequence[Tensor]) -> Tensor:
    return grads[0].new_empty((*grads[0].shape[:-1], weights[0].shape[1]))


def _fake_forward(*arguments: Any) -> tuple[list[Tensor], Tensor]:
    of = ForwardArguments(*arguments)
    _check_weights(of.x, of.weights, of.row_scales)
    return lora.fake_forward(of.x, [weight.shape[0] for weight in of.weights], of.downs, of.ups, of.scales, of.p, of.h)


def _fake_backward(*arguments: Any) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    of = BackwardArguments(*arguments)
    return lora.fake_backward(of.x, of.downs, of.ups, of.need_x, of.need_down, of.need_up)


def _linear_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight, row_scale, _ = inputs
    ctx.save_for_backward(weight, row_scale)


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
    weight, row_scale = ctx.saved_tensors
    need_x, _, _, need_bias = ctx.needs_input_grad
    grad_x = torch.ops.zerolora.eight_bit_linear_backward([grad], [weight], [row_scale]) if need_x else None
    return grad_x, None, None, grad.reshape(-1, grad.shape[-1]).sum(0) if need_bias else None


for _name, _function in REFERENCE.items():
    torch.library.impl(f"zerolora::{_name}", "cpu")(_function)
torch.library.register_fake("zerolora::quantize_rows")(_fake_quantize_rows)
torch.library.register_fake("zerolora::eight_bit_product")(_fake_product)
torch.library.register_fake("zerolora::eight_bit_linear")(_fake_linear)
torch.library.register_fake("zerolora::eight_bit_linear_backward")(_fake_linear_backward)
torch.library.register_fake("zerolora::eight_bit_forward")(_fake_forward)
torch.library.register_fake("zerolora::eight_bit_backward")(_fake_backward)
torch.library.register_autograd("zerolora::eight_bit_linear", _linear_backward, setup_context=_linear_context)
torch.library.register_autograd("zerolora::eight_bit_linear_backward", derivative.refuse_second_derivative)
derivative.register("eight_bit")
_FORWARD = torch.ops.zerolora.eight_bit_forward.default
_LINEAR = torch.ops.zerolora.eight_bit_linear.default


def quantize_rows(values: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Quantise values[N,K] by the largest magnitude of each row: (W_q[N,K], scale[N]); `kind` is fp8 or int8.

    scale = max(largest / 448, 2^-100) for fp8 (e4m3), / 127 for int8; a NaN makes the scale of its row NaN.
    """
    q, scale = torch.ops.zerolora.quantize_rows([values], [], STORAGE[kind])
    return q, scale


def eight_bit_linear(x: Tensor, weight: EightBitWeight, bias: Tensor | None) -> Tensor:
    """Compute y = t (x_q W_q^T) v + bias for a frozen weight without an adapter; dX = u (g_q W_q)."""
    y: Tensor = _LINEAR(x, weight.values, weight.row_scale, bias)
    return y


def eight_bit_group(
    x: Tensor,
    weights: Sequence[EightBitWeight],
    biases: Sequence[Tensor | None],
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    scales: Sequence[float],
    dropout: float = 0.0,
) -> list[Tensor]:
    """Compute `lora.lora_group` for 8-bit weights; the result has the type of x.

    Raises:
        ValueError: as `lora.lora_group`; a weight that is not gathered; weights of different kinds.
    """
    arguments = ForwardArguments(
        x=x,
        weights=[weight.values for weight in weights],
        row_scales=[weight.row_scale for weight in weights],
        biases=lora.fill_biases(x, biases, [weight.values.shape[0] for weight in weights]),
        downs=downs,
        ups=ups,
        scales=scales,
        p=dropout,
        seed=draw_seed(x, dropout),
        h=None,
    )
    ys, _ = _FORWARD(*arguments)
    return ys
