"""Several adapters on the output of one frozen product, each on its own tokens, which are sorted by adapter.

Legend: P adapters with equal tokens, ranks and scales, T tokens of each, I in, O out, R rank; each such bundle is a
batched product. Formulas as in ops/reference.py, for each adapter on its rows. No product reads the rows of two
adapters, so a NaN in one of them does not spread (0 * NaN is NaN).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """One adapter's rows [start, end) of the flattened tokens, and the layers, scales and ranks of its factors."""

    start: int
    end: int
    layers: tuple[int, ...]
    scales: tuple[float, ...]
    ranks: tuple[int, ...]
    dropout: float = 0.0
    seed: Tensor | None = None


@dataclass(frozen=True)
class _Bundle:
    """Parts with adjacent rows that differ only in rows and factors; a part with dropout forms its own bundle."""

    parts: Sequence[Part]
    first_factor: int
    """Position of the first part's first factor."""

    @property
    def first(self) -> Part:
        return self.parts[0]

    def rows(self, tensor: Tensor) -> Tensor:
        """Return this bundle's rows [P, T, width] of a tensor of all tokens."""
        flat = tensor.view(-1, tensor.shape[-1])[self.first.start : self.parts[-1].end]
        return flat.view(len(self.parts), -1, tensor.shape[-1])

    def factors(self, factors: Sequence[Tensor], layer: int, dtype: torch.dtype) -> Tensor:
        """Return one layer's factors stacked, [P, ...]."""
        return torch.stack([factors[position] for position in self.positions(layer)]).to(dtype)

    def positions(self, layer: int) -> list[int]:
        """Return the positions of a layer's factors in the list of all."""
        return [self.first_factor + number * len(self.first.layers) + layer for number in range(len(self.parts))]

    def project(self, x_PTI: Tensor, down_PRI: Tensor, scale: float) -> Tensor:
        if not self.first.dropout:
            return scale * (x_PTI @ down_PRI.mT)
        options = [scale], self.first.dropout, self.first.seed
        h_TR: Tensor = torch.ops.zerolora.lora_project(x_PTI[0], [down_PRI[0].contiguous()], *options)
        return h_TR[None, :, : down_PRI.shape[1]]

    def grad_down(self, x_PTI: Tensor, grad_h_PTR: Tensor) -> Tensor:
        if not self.first.dropout:
            return grad_h_PTR.mT @ x_PTI
        _, gradient = torch.ops.zerolora.rank_pass(x_PTI[0], None, grad_h_PTR[0], self.first.dropout, self.first.seed)
        return gradient[None]

    def add_grad_x(self, grad_x_PTI: Tensor, grad_h_PTR: Tensor, down_PRI: Tensor) -> None:
        if not self.first.dropout:
            grad_x_PTI.baddbmm_(grad_h_PTR, down_PRI)
            return
        scaled, up = grad_h_PTR[0] / (1.0 - self.first.dropout), down_PRI[0].t().contiguous()
        grad_x_PTI[0] += torch.ops.zerolora.rank_expand(scaled, up, self.first.dropout, self.first.seed)


def _bundle_parts(parts: Sequence[Part]) -> Iterator[_Bundle]:
    def key(numbered: tuple[int, Part]) -> tuple[Any, ...]:
        number, part = numbered
        tokens = part.end - part.start
        # The second item is equal for adjacent rows; an adapter without these layers leaves a gap.
        shared = tokens, part.start - number * tokens, part.layers, part.scales, part.ranks
        return *shared, number if part.dropout else -1

    position = 0
    for _, group in groupby(enumerate(parts), key):
        bundle = _Bundle([part for _, part in group], position)
        position += len(bundle.parts) * len(bundle.first.layers)
        yield bundle


def add_adapters(
    x: Tensor, ys: Sequence[Tensor], parts: Sequence[Part], downs: Sequence[Tensor], ups: Sequence[Tensor]
) -> list[Tensor]:
    """Return y_l + s (m*x) A^T B^T for the layers l that read x, in place; `downs` and `ups` follow parts and layers.

    x[..., I], y_l[..., O_l]; A[R, I], B[O_l, R]. The layers of a part share its dropout mask m, which has
    as many rows as the part.
    """
    return list(_AddAdapters.apply(x, list(_bundle_parts(parts)), len(ys), *ys, *downs, *ups))


class _AddAdapters(torch.autograd.Function):
    """Saves x, the factors, and h of each layer and bundle, but nothing of size T x O and no mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bundles: list[_Bundle], count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ys, factors = tensors[:count], tensors[count:]
        downs, ups = factors[: len(factors) // 2], factors[len(factors) // 2 :]
        hs = []
        for bundle in bundles:
            x_PTI = bundle.rows(x.contiguous())
            for layer, (output, scale) in enumerate(zip(bundle.first.layers, bundle.first.scales, strict=True)):
                hs.append(bundle.project(x_PTI, bundle.factors(downs, layer, x.dtype), scale))
                bundle.rows(ys[output]).baddbmm_(hs[-1], bundle.factors(ups, layer, x.dtype).mT)
        ctx.bundles = bundles
        ctx.save_for_backward(x, *factors, *hs)
        ctx.mark_dirty(*ys)
        return ys

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *saved = ctx.saved_tensors
        number = sum(len(bundle.parts) * len(bundle.first.layers) for bundle in ctx.bundles)
        downs, ups, hs = saved[:number], saved[number : 2 * number], iter(saved[2 * number :])
        grad_x = x.new_zeros(x.shape) if ctx.needs_input_grad[0] else None
        factor_grads: list[Tensor | None] = [None] * (2 * number)
        grads = tuple(grad.contiguous() for grad in grads)
        for bundle in ctx.bundles:
            x_PTI = bundle.rows(x.contiguous())
            for layer, (output, scale) in enumerate(zip(bundle.first.layers, bundle.first.scales, strict=True)):
                grad_PTO, down_PRI = bundle.rows(grads[output]), bundle.factors(downs, layer, x.dtype)
                grad_h_PTR = scale * (grad_PTO @ bundle.factors(ups, layer, x.dtype))
                parts = (bundle.grad_down(x_PTI, grad_h_PTR), grad_PTO.mT @ next(hs))
                for position, down, up in zip(bundle.positions(layer), *parts, strict=True):
                    factor_grads[position], factor_grads[number + position] = (
                        down.to(downs[position].dtype),
                        up.to(ups[position].dtype),
                    )
                if grad_x is not None:
                    bundle.add_grad_x(bundle.rows(grad_x), grad_h_PTR, down_PRI)
        return grad_x, None, None, *grads, *factor_grads
