"""An adapted linear layer as a server with integer weights will compute it: the merged weight, rounded, in every pass.

Legend: T tokens (leading dimensions flattened), I in, O out, R rank, G groups of a row that share a scale; x[T,I],
W[O,I] frozen, A[R,I] down, B[O,R] up, m = keep / (1 - p) the dropout mask. Q rounds to integers times a scale; it
is an argument.

    M  = W + s B A                                        (in 32 bits)
    y  = x Q(M)^T + bias + s ((m - 1)*x) A^T B^T          dX = dY Q(M) + s (m - 1)*(dY B A)
    dB = s dY^T ((m*x) A^T)                               dA = s (dY B)^T (m*x)

Gradients pass straight through Q: its derivative is taken to be 1 (Bengio et al. 2013, arXiv:1308.3432), as befits
scales that cut no weight off. So dM = dY^T x is never formed. What dropout changes is added
beside the product, with a mean of 0 over masks: the weight that is rounded stays the one that will be served. Between
the passes x and the parameters are kept; Q(M) is made again, and the mask drawn again.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]
"""M[n,I] in 32 bits -> whole numbers [n,I] in int8, and their scales [n,G] in 32 bits."""
ELEMENTS_AT_ONCE = 1 << 23
"""Of a weight while it is rounded: its copies in 32 bits would be several times the weight."""


def quantised_merged(
    weight: Tensor, down: Tensor, up: Tensor, scale: float, quantise: Quantise
) -> tuple[Tensor, Tensor]:
    """Q(W + s B A) as whole numbers [O,I] and scales [O,G]: the bits that the layer computes with."""
    parts = [(values, scales) for _, values, scales in _in_parts(weight, down, up, scale, quantise)]
    values, scales = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(scales)


def dequantised(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[O,I] in `dtype`: each whole number times the scale of its group, rounded once."""
    grouped = values.view(len(values), scales.shape[1], -1).float() * scales.float().unsqueeze(-1)
    return grouped.view(values.shape).to(dtype)


def fake_quantised(weight: Tensor, down: Tensor, up: Tensor, scale: float, quantise: Quantise) -> Tensor:
    """Q(W + s B A)[O,I] in the type of W; in 32 bits there is never more of it than ELEMENTS_AT_ONCE."""
    found = torch.empty_like(weight)
    for rows, values, scales in _in_parts(weight, down, up, scale, quantise):
        found[rows] = dequantised(values, scales, weight.dtype)
    return found


def _in_parts(
    weight: Tensor, down: Tensor, up: Tensor, scale: float, quantise: Quantise
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Some rows at a time, always the same ones: sums of other shapes may have other bits."""
    count = max(1, ELEMENTS_AT_ONCE // weight.shape[1])
    weight, up, down_RI = weight.detach(), up.detach(), down.detach().float()
    for begin in range(0, len(weight), count):
        rows = slice(begin, begin + count)
        yield rows, *quantise(weight[rows].float() + scale * (up[rows].float() @ down_RI))


def _mask(x: Tensor, p: float, seed: int) -> Tensor:
    """m in the shape and type of x."""
    generator = torch.Generator(x.device).manual_seed(seed)
    drawn = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return drawn.bernoulli_(1.0 - p, generator=generator).div_(1.0 - p)


class _FakeQuantisedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scale: float,
        quantise: Quantise,
        p: float,
        seed: int,
    ) -> Tensor:
        # The Parameters themselves are kept: under ZeRO-3 they are freed after the forward and come back before the
        # backward, and a view would not.
        ctx.save_for_backward(x, weight, down, up)
        ctx.scale, ctx.quantise, ctx.p, ctx.seed = scale, quantise, p, seed
        y = torch.nn.functional.linear(x, fake_quantised(weight, down, up, scale, quantise), bias)
        if p:
            noise = x * _mask(x, p, seed).sub_(1.0)
            y += scale * (noise @ down.to(x.dtype).t()) @ up.to(x.dtype).t()
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, down, up = ctx.saved_tensors
        need_x, need_weight, need_bias, need_down, need_up = ctx.needs_input_grad[:5]
        if need_weight:
            raise ValueError("weight.requires_grad=True: there is no gradient of the base weight here; freeze it")
        mask = _mask(x, ctx.p, ctx.seed) if ctx.p else None
        grad_y, masked = grads[0], x if mask is None else x * mask
        masked_TI, grad_TO = masked.reshape(-1, x.shape[-1]), grad_y.reshape(-1, grad_y.shape[-1])
        grad_h_TR = ctx.scale * (grad_TO @ up.to(x.dtype))
        grad_x = grad_y @ fake_quantised(weight, down, up, ctx.scale, ctx.quantise) if need_x else None
        if grad_x is not None and mask is not None:
            grad_x += mask.sub_(1.0) * (grad_h_TR @ down.to(x.dtype)).view(x.shape)
        grad_down = (grad_h_TR.t() @ masked_TI).to(down.dtype) if need_down else None
        grad_up = (ctx.scale * grad_TO.t() @ (masked_TI @ down.to(x.dtype).t())).to(up.dtype) if need_up else None
        return grad_x, None, grad_TO.sum(0) if need_bias else None, grad_down, grad_up, None, None, None, None


def fake_quantised_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
    quantise: Quantise,
    dropout: float = 0.0,
) -> Tensor:
    """y[..., O] = x Q(W + s B A)^T + bias + s ((m - 1)*x) A^T B^T for x[..., I] in the type of W.

    The mask comes from torch's generator of the CPU: recomputation draws it again. Gradients go to x, bias, A and B.
    Raises ValueError in the backward pass where W itself wants a gradient.
    """
    seed = int(torch.randint(0, 2**62, (), device="cpu")) if dropout else 0
    result: Tensor = _FakeQuantisedLinear.apply(x, weight, bias, down, up, scale, quantise, dropout, seed)
    return result
