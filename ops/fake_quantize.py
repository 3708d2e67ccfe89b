"""Adapted linear layer for quantization-aware training: the merged weight is quantized in every pass.

Legend: T tokens (leading dimensions flattened), I in, O out, R rank, G groups per row that share a scale; x[T,I],
W[O,I] frozen, A[R,I] down, B[O,R] up, m = keep / (1 - p) the dropout mask. The argument Q returns integers and their
scales.

    M  = W + s B A                                        (in fp32)
    y  = x Q(M)^T + bias + s ((m - 1)*x) A^T B^T          dX = dY Q(M) + s (m - 1)*(dY B A)
    dB = s dY^T ((m*x) A^T)                               dA = s (dY B)^T (m*x)

Q is treated as the identity in the backward pass (straight-through estimator, Bengio et al. 2013, arXiv:1308.3432).
The scales never clip a weight, so no clipping mask is needed, and dM = dY^T x is never formed. The effect of dropout is
added separately, with a mean of 0 over masks, so the quantized weight is the one that will be served. Only x and the
parameters are saved for the backward; Q(M) and the mask are recomputed.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Function from M[n,I] in fp32 to int8 integers [n,I] and their fp32 scales [n,G]."""
ELEMENTS_AT_ONCE = 1 << 23
"""Maximum number of weight elements quantized at once: their fp32 copies need several times the memory."""


def quantize_merged_weight(
    weight: Tensor, down: Tensor, up: Tensor, scale: float, quantize: Quantize
) -> tuple[Tensor, Tensor]:
    """Return the integers [O,I] and scales [O,G] of Q(W + s B A), exactly as the layer uses them."""
    parts = [(values, scales) for _, values, scales in _quantize_rows(weight, down, up, scale, quantize)]
    values, scales = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(scales)


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [O,I] in `dtype`: each integer times the scale of its group, rounded once."""
    grouped = values.view(len(values), scales.shape[1], -1).float() * scales.float().unsqueeze(-1)
    return grouped.view(values.shape).to(dtype)


def fake_quantize(weight: Tensor, down: Tensor, up: Tensor, scale: float, quantize: Quantize) -> Tensor:
    """Return Q(W + s B A)[O,I] in the type of W. At most ELEMENTS_AT_ONCE elements exist in fp32 at a time."""
    rounded = torch.empty_like(weight)
    for rows, values, scales in _quantize_rows(weight, down, up, scale, quantize):
        rounded[rows] = dequantize(values, scales, weight.dtype)
    return rounded


def _quantize_rows(
    weight: Tensor, down: Tensor, up: Tensor, scale: float, quantize: Quantize
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (rows, integers, scales) for each block of rows of the merged weight.

    The blocks are the same in every pass, because rounding can depend on their shapes.
    """
    count = max(1, ELEMENTS_AT_ONCE // weight.shape[1])
    weight, up, down_RI = weight.detach(), up.detach(), down.detach().float()
    for begin in range(0, len(weight), count):
        rows = slice(begin, begin + count)
        yield rows, *quantize(weight[rows].float() + scale * (up[rows].float() @ down_RI))


def _draw_mask(x: Tensor, p: float, seed: int) -> Tensor:
    generator = torch.Generator(x.device).manual_seed(seed)
    mask = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return mask.bernoulli_(1.0 - p, generator=generator).div_(1.0 - p)


class _FakeQuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scale: float,
        quantize: Quantize,
        p: float,
        seed: int,
    ) -> Tensor:
        # Save the Parameters themselves: ZeRO-3 frees them after the forward and gathers them again before the
        # backward, which would not update a view.
        ctx.save_for_backward(x, weight, down, up)
        ctx.scale, ctx.quantize, ctx.p, ctx.seed = scale, quantize, p, seed
        y = torch.nn.functional.linear(x, fake_quantize(weight, down, up, scale, quantize), bias)
        if p:
            noise = x * _draw_mask(x, p, seed).sub_(1.0)
            y += scale * (noise @ down.to(x.dtype).t()) @ up.to(x.dtype).t()
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, down, up = ctx.saved_tensors
        need_x, need_weight, need_bias, need_down, need_up = ctx.needs_input_grad[:5]
        if need_weight:
            raise ValueError("weight.requires_grad=True: this operator does not compute its gradient; freeze it")
        mask = _draw_mask(x, ctx.p, ctx.seed) if ctx.p else None
        grad_y, masked = grads[0], x if mask is None else x * mask
        masked_TI, grad_TO = masked.reshape(-1, x.shape[-1]), grad_y.reshape(-1, grad_y.shape[-1])
        grad_h_TR = ctx.scale * (grad_TO @ up.to(x.dtype))
        grad_x = grad_y @ fake_quantize(weight, down, up, ctx.scale, ctx.quantize) if need_x else None
        if grad_x is not None and mask is not None:
            grad_x += mask.sub_(1.0) * (grad_h_TR @ down.to(x.dtype)).view(x.shape)
        grad_down = (grad_h_TR.t() @ masked_TI).to(down.dtype) if need_down else None
        grad_up = (ctx.scale * grad_TO.t() @ (masked_TI @ down.to(x.dtype).t())).to(up.dtype) if need_up else None
        return grad_x, None, grad_TO.sum(0) if need_bias else None, grad_down, grad_up, None, None, None, None


def fake_quantize_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
    quantize: Quantize,
    dropout: float = 0.0,
) -> Tensor:
    """Compute y[..., O] = x Q(W + s B A)^T + bias + s ((m - 1)*x) A^T B^T for x[..., I] in the type of W.

    The mask's seed is drawn on the CPU, so recomputation repeats the mask. Differentiable in x, bias, A and B.
    Raises ValueError in the backward pass if W itself requires a gradient.
    """
    seed = int(torch.randint(0, 2**62, (), device="cpu")) if dropout else 0
    return _FakeQuantizedLinear.apply(x, weight, bias, down, up, scale, quantize, dropout, seed)
