"""Add several adapters to the output of a frozen product; each has some of the tokens, which are sorted by adapter.

Legend: P adapters of a bundle, T tokens of each, L layers that share an input, I in, O out, R rank. Formulas as in
ops/reference.py, for each adapter on its rows. `add_adapters` batches the products of a bundle. `fused_group` computes
a whole batch of one bundle: x with the A of all adapters in one product, of which each row keeps the columns of its own
adapter, and the frozen product with the B of all adapters in another. A NaN in the rows of an adapter stays in them; no
sum over rows reads those of two adapters (0 * NaN is NaN).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

_ops: Any = torch.ops.zerolora
MAX_COLUMNS = 256
"""Ranks of all adapters, P R, up to which the unused columns of `fused_group` cost less than batched products."""
MAX_PARTS = 4
"""Weights that share a product for the gradient of x, at most (kMaxParts in ops/csrc/common/kernels.h)."""
AT_ONCE_BYTES = 64 << 20
"""Memory of dequantized weights up to which they share a product, as in ops/nf4.py."""


@dataclass(frozen=True)
class Bundle:
    """`count` adapters with adjacent rows [start, end) of the flattened tokens; they differ only in their factors.

    Each has the same number of tokens, the same `layers` and `scales`. With dropout, a bundle has one adapter.
    """

    start: int
    end: int
    count: int
    layers: tuple[int, ...]
    scales: tuple[float, ...]
    dropout: float = 0.0
    seed: Tensor | None = None

    def rows(self, tensor: Tensor) -> Tensor:
        """Return [P, T, width] of a contiguous tensor of all tokens."""
        width = tensor.shape[-1]
        return tensor.view(-1, width)[self.start : self.end].view(self.count, -1, width)

    def project(self, x_PTI: Tensor, down_PRI: Tensor, scale: float) -> Tensor:
        if not self.dropout:
            return _multiply_scaled(x_PTI, down_PRI.mT, scale)
        options = [scale], self.dropout, self.seed
        h_TR: Tensor = torch.ops.zerolora.lora_project(x_PTI[0], [down_PRI[0].contiguous()], *options)
        return h_TR[None, :, : down_PRI.shape[1]]

    def grad_down(self, x_PTI: Tensor, grad_h_PTR: Tensor) -> Tensor:
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


def add_adapters(
    x: Tensor,
    ys: Sequence[Tensor],
    bundles: Sequence[Bundle],
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
) -> list[Tensor]:
    """Add s (m*x) A^T B^T in place to y_l of the layers l that read x, and return all y_l.

    x[..., I], y_l[..., O_l]; A[P, R, I], B[P, O_l, R]; `downs` and `ups` are ordered by bundle, then by layer. The
    layers of a bundle share its dropout mask m; its first row is for the bundle's first token.
    """
    return list(_AddAdapters.apply(x, bundles, len(ys), *ys, *downs, *ups))


def _multiply_scaled(left: Tensor, right: Tensor, scale: float) -> Tensor:
    return torch.baddbmm(left.new_empty(1, 1, 1), left, right, beta=0, alpha=scale)


class _AddAdapters(torch.autograd.Function):
    """Saves x, the factors and h of each layer and bundle, but nothing of size T x O and no mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bundles: Sequence[Bundle], count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ys, factors = [y.detach() for y in tensors[:count]], tensors[count:]  # autograd allows no change of views
        x = x.contiguous()
        hs = []
        for bundle, layer, scale, down_PRI, up_POR in _walk(bundles, factors):
            h_PTR = bundle.project(bundle.rows(x), down_PRI, scale)
            bundle.rows(ys[layer]).baddbmm_(h_PTR, up_POR.mT)
            hs.append(h_PTR)
        ctx.bundles = bundles
        ctx.save_for_backward(x, *factors, *hs)
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *saved = ctx.saved_tensors
        number = len(saved) // 3
        grads = tuple(grad.contiguous() for grad in grads)
        grad_downs, grad_ups, grad_x = list[Tensor](), list[Tensor](), torch.zeros_like(x)
        walk = _walk(ctx.bundles, saved[: 2 * number])
        for (bundle, layer, scale, down_PRI, up_POR), h_PTR in zip(walk, saved[2 * number :], strict=True):
            grad_PTO = bundle.rows(grads[layer])
            grad_h_PTR = _multiply_scaled(grad_PTO, up_POR, scale)
            grad_downs.append(bundle.grad_down(bundle.rows(x), grad_h_PTR))
            grad_ups.append(grad_PTO.mT @ h_PTR)
            bundle.add_grad_x(bundle.rows(grad_x), grad_h_PTR, down_PRI)
        return grad_x, None, None, *grads, *grad_downs, *grad_ups


def _walk(bundles: Sequence[Bundle], factors: Sequence[Tensor]) -> list[tuple[Bundle, int, float, Tensor, Tensor]]:
    """Return (bundle, layer, scale, A, B) of each layer of each bundle."""
    pairs = [
        (bundle, layer, scale) for bundle in bundles for layer, scale in zip(bundle.layers, bundle.scales, strict=True)
    ]
    downs, ups = factors[: len(pairs)], factors[len(pairs) :]
    return [(*pair, down, up) for pair, down, up in zip(pairs, downs, ups, strict=True)]


@dataclass(frozen=True)
class FrozenWeight:
    """A frozen weight [O, I], which `dense(*stored, dtype=...)` returns."""

    dense: Callable[..., Tensor]
    stored: tuple[Tensor, ...]
    bias: Tensor | None


def fused_group(
    x: Tensor, weights: Sequence[FrozenWeight], bundle: Bundle, downs: Sequence[Tensor], ups: Sequence[Tensor]
) -> list[Tensor]:
    """Compute y_l = x W_l^T + bias_l + s x A_l^T B_l^T, each row with its adapter's A[P, R, I] and B[P, O_l, R].

    The bundle has all rows of x[..., I], no dropout, and the same rank and scale for every layer. This is fastest for
    A and B in memory as [P R, I] and [O_l, P R].
    """
    stored = [tensor for weight in weights for tensor in weight.stored]
    return list(_FusedGroup.apply(x, weights, bundle, *downs, *ups, *stored))


@cache
def _other_adapters(count: int, device: torch.device) -> Tensor:
    """Return [P, 1, 1, P, 1]: True where the adapter of the rows is not that of the columns."""
    return ~torch.eye(count, dtype=torch.bool, device=device)[:, None, None, :, None]


def _keep_own(h_TC: Tensor, count: int, layers: int) -> Tensor:
    """Set the columns of other adapters to zero in h[P T, L P R], and return the rest as [P, T, L, R]."""
    own = h_TC.view(count, -1, layers, count, h_TC.shape[1] // (layers * count))
    own.masked_fill_(_other_adapters(count, h_TC.device), 0.0)
    return own.diagonal(dim1=0, dim2=3).permute(3, 0, 1, 2).contiguous()


class _FusedGroup(torch.autograd.Function):
    """Saves x, the factors, h and the weights as they are stored."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Sequence[FrozenWeight], bundle: Bundle, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        count, layers = bundle.count, len(weights)
        x_TI = x.reshape(-1, x.shape[-1])
        downs, ups = tensors[:layers], tensors[layers : 2 * layers]
        down_CI = torch.cat([down.flatten(0, 1) for down in downs])
        h_TC = torch.addmm(x.new_empty(1, 1), x_TI, down_CI.t(), beta=0, alpha=bundle.scales[0])
        h_PTLR = _keep_own(h_TC, count, layers)
        ys = []
        for weight, up, h in zip(weights, ups, h_TC.chunk(layers, 1), strict=True):
            bias = None if weight.bias is None else weight.bias.to(x.dtype)
            dense = [weight.dense(*(each.data for each in weight.stored), dtype=x.dtype)]
            y_TO = _ops.frozen_product([x_TI], dense, h, up.transpose(0, 1).flatten(1), bias, None, False)
            dense.clear()
            ys.append(y_TO.view(*x.shape[:-1], -1))
        ctx.weights, ctx.bundle = [(weight.dense, len(weight.stored)) for weight in weights], bundle
        ctx.save_for_backward(x_TI, h_PTLR, *tensors)
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x_TI, h_PTLR, *tensors = ctx.saved_tensors
        count, layers, scale = ctx.bundle.count, len(ctx.weights), ctx.bundle.scales[0]
        downs, ups, stored = tensors[:layers], tensors[layers : 2 * layers], iter(tensors[2 * layers :])
        grads_TO = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        down_CI = torch.cat([down.flatten(0, 1) for down in downs])
        grad_h_TC = x_TI.new_empty(len(x_TI), len(down_CI))
        for grad, up, target in zip(grads_TO, ups, grad_h_TC.chunk(layers, 1), strict=True):
            torch.addmm(grad.new_empty(1, 1), grad, up.transpose(0, 1).flatten(1), beta=0, alpha=scale, out=target)
        grad_h_PTLR = _keep_own(grad_h_TC, count, layers)
        grad_ups = [ctx.bundle.rows(grad).mT @ h for grad, h in zip(grads_TO, h_PTLR.unbind(2), strict=True)]
        grad_downs = (grad_h_PTLR.flatten(2).mT @ ctx.bundle.rows(x_TI)).unflatten(1, (layers, -1)).unbind(1)
        grad_x: Tensor | None = None
        if ctx.needs_input_grad[0]:
            weights: list[Callable[[], Tensor]] = []
            for dense, number in ctx.weights:
                own = [next(stored).data for _ in range(number)]
                weights.append(partial(dense, *own, dtype=x_TI.dtype))
            size = sum(len(up[0]) for up in ups) * x_TI.shape[1] * x_TI.element_size()
            together = MAX_PARTS if own[0].is_floating_point() or size <= AT_ONCE_BYTES else 1
            first = [weight().t() for weight in weights[:together]]
            total = _ops.frozen_product(grads_TO[:together], first, grad_h_TC, down_CI.t(), None, None, False)
            first.clear()  # before the next weight is dequantized
            for grad, weight in zip(grads_TO[together:], weights[together:], strict=True):
                total.addmm_(grad, weight())
            grad_x = total.view(*grads[0].shape[:-1], -1)
        return grad_x, None, None, *grad_downs, *grad_ups, *[None] * (len(tensors) - 2 * layers)
