"""Several adapters on the output of a frozen product: each has some of the tokens, which are sorted by adapter.

Legend: T tokens of one adapter, I in, O out, R rank. Formulas as in ops/reference.py, for each adapter on its own rows.
Every product has the shapes that it has when the adapter is trained alone, and no product reads the rows of two
adapters: a NaN in one of them, where 0 * NaN would spread through a common product, stays there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ops.lora import check_adapters, padded_rank


@dataclass(frozen=True)
class Part:
    """One adapter's rows [start, end) of the flattened tokens, and which of the layers it has with which scale."""

    start: int
    end: int
    layers: Sequence[int]
    scales: Sequence[float]
    dropout: float = 0.0
    seed: Tensor | None = None


def add_adapters(
    x: Tensor, ys: Sequence[Tensor], parts: Sequence[Part], downs: Sequence[Tensor], ups: Sequence[Tensor]
) -> list[Tensor]:
    """Return y_l + s (m*x) A^T B^T for the layers l that read x, in place; `downs` and `ups` follow parts and layers.

    x[..., I], y_l[..., O_l]; A[R, I], B[O_l, R]. The layers of a part share its dropout mask m, whose first row is the
    part's first. Raises ValueError for shapes and types that do not fit.
    """
    place = 0
    for part in parts:
        many = len(part.layers)
        outs = [ys[layer].shape[-1] for layer in part.layers]
        factors = downs[place : place + many], ups[place : place + many]
        check_adapters(x, outs, *factors, part.scales, part.dropout)
        place += many
    return list(_AddAdapters.apply(x, parts, len(ys), *ys, *downs, *ups))


class _AddAdapters(torch.autograd.Function):
    """Saves x, the factors and h[T, R] of each part, nothing of size T x O, and no mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Sequence[Part], count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ys, factors = tensors[:count], tensors[count:]
        downs, ups = factors[: len(factors) // 2], factors[len(factors) // 2 :]
        x_TI = x.reshape(-1, x.shape[-1])
        hs, place = [], 0
        for part in parts:
            rows, many = x_TI[part.start : part.end], len(part.layers)
            own = downs[place : place + many]
            h = torch.ops.zerolora.lora_project(rows, own, part.scales, part.dropout, part.seed)
            for layer, h_TR, up in zip(part.layers, _columns(h, own), ups[place:], strict=False):
                y_TO = ys[layer].view(-1, ys[layer].shape[-1])
                y_TO[part.start : part.end].addmm_(h_TR, up.to(x.dtype).t())
            hs.append(h)
            place += many
        ctx.parts, ctx.count = parts, count
        ctx.save_for_backward(x, *factors, *hs)
        ctx.mark_dirty(*ys)
        return ys

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *saved = ctx.saved_tensors
        number = sum(len(part.layers) for part in ctx.parts)
        downs, ups, hs = saved[:number], saved[number : 2 * number], saved[2 * number :]
        x_TI = x.reshape(-1, x.shape[-1])
        grad_x = torch.zeros_like(x_TI) if ctx.needs_input_grad[0] else None
        grad_downs, grad_ups, place = [], [], 0
        for part, h in zip(ctx.parts, hs, strict=True):
            rows = slice(part.start, part.end)
            own = range(place, place + len(part.layers))
            for layer, scale, n, h_TR in zip(
                part.layers, part.scales, own, _columns(h, [downs[n] for n in own]), strict=True
            ):
                grad_TO = grads[layer].reshape(-1, grads[layer].shape[-1])[rows]
                grad_h_TR = scale * (grad_TO @ ups[n].to(x.dtype))
                grad_ups.append((grad_TO.t() @ h_TR).to(ups[n].dtype))
                down = downs[n].to(x.dtype)
                grad_downs.append(_grad_down(x_TI[rows], grad_h_TR, part).to(downs[n].dtype))
                if grad_x is not None:
                    _add_grad_x(grad_x[rows], grad_h_TR, down, part)
            place += len(part.layers)
        found = None if grad_x is None else grad_x.view(x.shape)
        return found, None, None, *grads, *grad_downs, *grad_ups


def _columns(h: Tensor, downs: Sequence[Tensor]) -> list[Tensor]:
    """Return h[T, R] of each layer from `lora_project`'s columns."""
    parts = h.split([padded_rank(len(down)) for down in downs], dim=1)
    return [part[:, : len(down)] for part, down in zip(parts, downs, strict=True)]


def _grad_down(x_TI: Tensor, grad_h_TR: Tensor, part: Part) -> Tensor:
    if not part.dropout:
        return grad_h_TR.t() @ x_TI
    gradient: Tensor = torch.ops.zerolora.rank_pass(x_TI, None, grad_h_TR, part.dropout, part.seed)[1]
    return gradient


def _add_grad_x(grad_x_TI: Tensor, grad_h_TR: Tensor, down: Tensor, part: Part) -> None:
    if not part.dropout:
        grad_x_TI.addmm_(grad_h_TR, down)
        return
    kept = 1.0 - part.dropout
    grad_x_TI += torch.ops.zerolora.rank_expand(grad_h_TR / kept, down.t().contiguous(), part.dropout, part.seed)
