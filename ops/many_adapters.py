"""Add several adapters' outputs to the output of a frozen matmul; tokens are sorted by adapter.

Legend: P adapters per bundle, T tokens per adapter, I in, O out, R rank. The matmuls of a bundle are batched. Formulas:
ops/reference.py, for each adapter and its rows. No matmul mixes the rows of two adapters, so a NaN in one adapter does
not spread to another (0 * NaN is NaN).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PendingProducts = list[tuple["Bundle", Tensor, Tensor]]
"""Tuples (bundle, gradient of h, A), with products not yet added to the gradient of x."""


@dataclass(frozen=True)
class Bundle:
    """`count` adapters with adjacent rows [start, end) of the flattened tokens; they differ only in their factors.

    All have the same number of tokens, `layers` and `scales`. With dropout, a bundle has only one adapter.
    """

    start: int
    end: int
    count: int
    layers: tuple[int, ...]
    scales: tuple[float, ...]
    dropout: float = 0.0
    seed: Tensor | None = None

    def view_rows(self, tensor: Tensor) -> Tensor:
        """Return this bundle's rows [P, T, width] of a contiguous tensor of all tokens."""
        width = tensor.shape[-1]
        return tensor.view(-1, width)[self.start : self.end].view(self.count, -1, width)

    def compute_h(self, x_PTI: Tensor, down_PRI: Tensor, scale: float) -> Tensor:
        if not self.dropout:
            return _multiply_scaled(x_PTI, down_PRI.mT, scale)
        options = [scale], self.dropout, self.seed
        h_TR: Tensor = torch.ops.zerolora.lora_project(x_PTI[0], [down_PRI[0].contiguous()], *options)
        return h_TR[None, :, : down_PRI.shape[1]]

    def compute_grad_down(self, x_PTI: Tensor, grad_h_PTR: Tensor) -> Tensor:
        if not self.dropout:
            return grad_h_PTR.mT @ x_PTI
        _, gradient = torch.ops.zerolora.rank_pass(x_PTI[0], None, grad_h_PTR[0], self.dropout, self.seed)
        return gradient[None]

    def add_grad_x(self, grad_x_PTI: Tensor, grad_h_PTR: Tensor, down_PRI: Tensor) -> None:
        if not self.dropout:
            grad_x_PTI.baddbmm_(grad_h_PTR, down_PRI)
            return
        scaled, up = grad_h_PTR[0] / (1.0 - self.dropout), down_PRI[0].t().contiguous()
        grad_x_PTI[0] += torch.ops.zerolora.rank_expand(scaled, up, self.dropout, self.seed)


def begin_frozen_matmuls(x: Tensor) -> tuple[Tensor, PendingProducts]:
    """Return x for the frozen matmuls, and a list to pass to `add_adapters` together with their outputs.

    The adapters' gradient of x is added in place to the frozen matmuls' gradient, which saves a buffer and a sum.
    """
    pending: PendingProducts = []
    return _FrozenMatmulsInput.apply(x, pending), pending


def add_adapters(
    x: Tensor,
    ys: Sequence[Tensor],
    bundles: Sequence[Bundle],
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    pending: PendingProducts,
) -> list[Tensor]:
    """Add s (m*x) A^T B^T in place to y_l of the layers l that read x, and return all y_l.

    x[..., I], y_l[..., O_l]; A[P, R, I], B[P, O_l, R]; `downs` and `ups` are ordered by bundle, then by layer. The
    layers of a bundle share its dropout mask m; its first row is for the bundle's first token.
    """
    return list(_AddAdapters.apply(x.detach(), bundles, len(ys), pending, *ys, *downs, *ups))


def _multiply_scaled(left: Tensor, right: Tensor, scale: float) -> Tensor:
    return torch.baddbmm(left.new_empty(1, 1, 1), left, right, beta=0, alpha=scale)


class _FrozenMatmulsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: PendingProducts) -> Tensor:
        ctx.pending = pending
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Tensor, None]:
        grad_x = grad_x.contiguous()
        for bundle, grad_h_PTR, down_PRI in ctx.pending:
            bundle.add_grad_x(bundle.view_rows(grad_x), grad_h_PTR, down_PRI)
        ctx.pending.clear()
        return grad_x, None


class _AddAdapters(torch.autograd.Function):
    """Autograd function of `add_adapters`, which saves x, factors and h, but no masks and nothing of size T x O."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bundles: Sequence[Bundle], count: int, pending: PendingProducts, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ys, factors = tensors[:count], tensors[count:]
        x = x.contiguous()
        hs = []
        for bundle, layer, scale, down_PRI, up_POR in _list_layer_factors(bundles, factors):
            h_PTR = bundle.compute_h(bundle.view_rows(x), down_PRI, scale)
            bundle.view_rows(ys[layer]).baddbmm_(h_PTR, up_POR.mT)
            hs.append(h_PTR)
        ctx.bundles, ctx.pending = bundles, pending
        ctx.save_for_backward(x, *factors, *hs)
        ctx.mark_dirty(*ys)
        return ys

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *saved = ctx.saved_tensors
        count = len(saved) // 3
        grads = tuple(grad.contiguous() for grad in grads)
        grad_downs, grad_ups = list[Tensor](), list[Tensor]()
        work = _list_layer_factors(ctx.bundles, saved[: 2 * count])
        for (bundle, layer, scale, down_PRI, up_POR), h_PTR in zip(work, saved[2 * count :], strict=True):
            grad_PTO = bundle.view_rows(grads[layer])
            grad_h_PTR = _multiply_scaled(grad_PTO, up_POR, scale)
            grad_downs.append(bundle.compute_grad_down(bundle.view_rows(x), grad_h_PTR))
            grad_ups.append(grad_PTO.mT @ h_PTR)
            ctx.pending.append((bundle, grad_h_PTR, down_PRI))
        return None, None, None, None, *grads, *grad_downs, *grad_ups


def _list_layer_factors(
    bundles: Sequence[Bundle], factors: Sequence[Tensor]
) -> list[tuple[Bundle, int, float, Tensor, Tensor]]:
    pairs = [
        (bundle, layer, scale) for bundle in bundles for layer, scale in zip(bundle.layers, bundle.scales, strict=True)
    ]
    downs, ups = factors[: len(pairs)], factors[len(pairs) :]
    return [(*pair, down, up) for pair, down, up in zip(pairs, downs, ups, strict=True)]
