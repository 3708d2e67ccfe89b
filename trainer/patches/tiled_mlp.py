"""Gated MLPs computed over tiles of the sequence, so that what they keep does not grow with its length.

The backward pass computes a tile again just before its gradients. Only the input is kept, by `_KeepInput`: a
recomputed layer stops there and does not compute the MLP a third time. The factors' gradients are added up over the
tiles in 32 bits and reach autograd once, as those of an untiled MLP do.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.contract.known_versions import replaces
from trainer.patches.norm_mlp_rope import is_gated_mlp
from trainer.patches.replace import replace

AUTO_TILE = 8192
"""Tokens per tile: enough for full matmul speed, and to make dequantizing a weight in every tile cheap."""
Trained = tuple[nn.Module, str, Tensor]  # a module, the name of a weight, and the tensor that it reads


@replaces("the forward of gated MLPs, to compute tiles of the sequence")
def tile_feed_forward(model: nn.Module, tile: int) -> int:
    """Compute the gated MLPs of a model without dropout over tiles of `tile` tokens; return their number."""
    parts = [module for module in model.modules() if is_gated_mlp(module) and not _draws(module)]
    for part in parts:
        replace(part, "forward", partial(_forward, part, part.forward, tile))
    return len(parts)


def _draws(part: nn.Module) -> bool:
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in part.modules())


def _forward(part: nn.Module, compute: Callable[[Tensor], Tensor], tile: int, x: Tensor) -> Tensor:
    if x.numel() <= tile * x.shape[-1]:
        return compute(x)
    trained = [tensor for *_, tensor in _trained(part)]
    if not torch.is_grad_enabled() or not (x.requires_grad or trained):
        return _compute_tiles(compute, x, tile)
    kept: list[Any] = []
    same = _KeepInput.apply(x, kept, trained[0] if trained else None)
    result: Tensor = _Tiled.apply(same, part, compute, tile, kept[0], *trained)
    return result


def _trained(part: nn.Module) -> list[Trained]:
    """Return what is trained in a module: Parameters, or the views of a flat adapter that shadow them."""
    found: list[Trained] = []
    for module in part.modules():
        own: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
        own |= {name: value for name, value in vars(module).items() if name in own and isinstance(value, Tensor)}
        found += [(module, name, tensor) for name, tensor in own.items() if tensor.requires_grad]
    return found


@contextmanager
def _read_leaves(trained: Sequence[Trained]) -> Iterator[list[Tensor]]:
    """Make modules read leaf copies of their weights within the block, to keep a tile's gradients out of the graph."""
    leaves = [tensor.detach().requires_grad_() for *_, tensor in trained]
    before = [vars(module).get(name) for module, name, _ in trained]
    for (module, name, _), leaf in zip(trained, leaves, strict=True):
        vars(module)[name] = leaf
    try:
        yield leaves
    finally:
        for (module, name, _), view in zip(trained, before, strict=True):
            if view is None:
                del vars(module)[name]
            else:
                vars(module)[name] = view


def _split(x: Tensor, tile: int) -> Sequence[Tensor]:
    return x.reshape(1, -1, x.shape[-1]).split(tile, dim=1)


def _compute_tiles(compute: Callable[[Tensor], Tensor], x: Tensor, tile: int) -> Tensor:
    results: Tensor | None = None
    start = 0
    for piece in _split(x, tile):
        result = compute(piece)
        if results is None:
            results = result.new_empty(1, x.numel() // x.shape[-1], result.shape[-1])
        results[:, start : start + piece.shape[1]] = result
        start += piece.shape[1]
    assert results is not None
    return results.view(*x.shape[:-1], -1)


class _KeepInput(torch.autograd.Function):
    """Return x, and keep it for `_Tiled`, which finds it in the context that is appended to `kept`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: list[Any], _: Tensor | None) -> Tensor:
        """`_` is trained: without it nothing would be kept of an x that needs no gradient."""
        ctx.save_for_backward(x)
        kept.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None


class _Tiled(torch.autograd.Function):
    """`compute` over tiles of x, which is kept by the context of `_KeepInput`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, part: nn.Module, compute: Callable[[Tensor], Tensor], tile: int, kept: Any, *_: Tensor
    ) -> Tensor:
        ctx.part, ctx.compute, ctx.tile, ctx.kept = part, compute, tile, kept
        return _compute_tiles(compute, x, tile)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.kept.saved_tensors  # recomputes the layer up to here, if it is recomputed
        trained = _trained(ctx.part)
        assert len(trained) == len(ctx.needs_input_grad) - 5, "other weights are trained than in the forward pass"
        sums = [torch.zeros_like(tensor, dtype=torch.float32) for *_, tensor in trained]
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        pieces = zip(*(_split(each, ctx.tile) for each in (x, grad, grad_x)), strict=True)
        with _read_leaves(trained) as leaves, torch.enable_grad():
            for piece, grad_of_piece, grad_of_input in pieces:
                leaf = piece.detach().requires_grad_()
                result = ctx.compute(leaf)
                found, *others = torch.autograd.grad(result, [leaf, *leaves], grad_of_piece, allow_unused=True)
                grad_of_input.copy_(found)
                for total, other in zip(sums, others, strict=True):
                    if other is not None:
                        total += other
                del result, found, others
        grads = [total.to(tensor.dtype) for total, (*_, tensor) in zip(sums, trained, strict=True)]
        return grad_x, None, None, None, None, *grads
