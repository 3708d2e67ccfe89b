"""Compute gated MLPs over tiles of the sequence, so that their activations do not grow with its length.

The backward pass recomputes a tile just before its gradients. `_SaveInput` keeps only the input, and a checkpointed
layer's recomputation stops there instead of computing the MLP a third time. The factors' gradients are summed over the
tiles in fp32, and passed to autograd once, as without tiles.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.contract.known_versions import patch_objects, replaces
from trainer.patches.norm_mlp_rope import is_gated_mlp
from trainer.patches.replace import replace

AUTO_TILE = 8192
"""Tokens per tile: enough for full matmul speed and a small relative cost of dequantizing weights per tile."""
TrainedTensor = tuple[nn.Module, str, Tensor]  # a module, the name of a weight, and the tensor that the module reads


@replaces("the forward of gated MLPs, to compute tiles of the sequence")
def tile_feed_forward(model: nn.Module, tile: int) -> int:
    """Make gated MLPs without dropout process `tile` tokens at a time; return how many there are."""
    dropouts = {module for module in model.modules() if isinstance(module, nn.Dropout) and module.p > 0}
    parts = [part for part in model.modules() if is_gated_mlp(part) and dropouts.isdisjoint(part.modules())]
    for part in parts:
        replace(part, "forward", partial(_forward, part, part.forward, tile))
    return len(parts)


def _forward(part: nn.Module, compute: Callable[[Tensor], Tensor], tile: int, x: Tensor) -> Tensor:
    if x.numel() <= tile * x.shape[-1]:
        return compute(x)
    trained = [tensor for *_, tensor in _list_trained_tensors(part)]
    if not torch.is_grad_enabled() or not (x.requires_grad or trained):
        return _compute_tiles(compute, x, tile)
    contexts: list[Any] = []
    view = _SaveInput.apply(x, contexts, trained[0] if trained else None)
    return _TiledMlp.apply(view, part, compute, tile, contexts[0], *trained)


def _list_trained_tensors(part: nn.Module) -> list[TrainedTensor]:
    """Return the trained Parameters of a module, or the views of a flat adapter that shadow them."""
    trained: list[TrainedTensor] = []
    for module in part.modules():
        tensors: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
        tensors |= {name: view for name, view in vars(module).items() if name in tensors and isinstance(view, Tensor)}
        trained += [(module, name, tensor) for name, tensor in tensors.items() if tensor.requires_grad]
    return trained


def _split_into_tiles(x: Tensor, tile: int) -> Sequence[Tensor]:
    return x.reshape(1, -1, x.shape[-1]).split(tile, dim=1)


def _compute_tiles(compute: Callable[[Tensor], Tensor], x: Tensor, tile: int) -> Tensor:
    results: Tensor | None = None
    start = 0
    for piece in _split_into_tiles(x, tile):
        result = compute(piece)
        if results is None:  # one buffer, because torch.cat would need twice the memory
            results = result.new_empty(1, x.numel() // x.shape[-1], result.shape[-1])
        results[:, start : start + piece.shape[1]] = result
        start += piece.shape[1]
    assert results is not None
    return results.view(*x.shape[:-1], -1)


class _SaveInput(torch.autograd.Function):
    """Returns x unchanged, saves it for `_TiledMlp`, and appends its own context to `contexts`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, contexts: list[Any], _: Tensor | None) -> Tensor:
        """Save x; the last argument requires a gradient, so autograd saves x even if x itself requires none."""
        ctx.save_for_backward(x)
        contexts.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None


class _TiledMlp(torch.autograd.Function):
    """Runs `compute` on tiles of x; only `_SaveInput` saves x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, part: nn.Module, compute: Callable[[Tensor], Tensor], tile: int, input_ctx: Any, *_: Tensor
    ) -> Tensor:
        ctx.part, ctx.compute, ctx.tile, ctx.input_ctx = part, compute, tile, input_ctx
        return _compute_tiles(compute, x, tile)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.input_ctx.saved_tensors  # a checkpointed layer is recomputed up to here
        trained = _list_trained_tensors(ctx.part)
        assert len(trained) == len(ctx.needs_input_grad) - 5, "trained weights differ from those of the forward pass"
        sums = [torch.zeros_like(tensor, dtype=torch.float32) for *_, tensor in trained]
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        pieces = zip(*(_split_into_tiles(tensor, ctx.tile) for tensor in (x, grad, grad_x)), strict=True)
        # Modules read leaf copies of their weights, to keep a tile's gradients out of the graph.
        leaves = [tensor.detach().requires_grad_() for *_, tensor in trained]
        copies = [(module, name, leaf) for (module, name, _), leaf in zip(trained, leaves, strict=True)]
        with patch_objects(*copies), torch.enable_grad():
            for piece, output_grad, input_grad in pieces:
                leaf = piece.detach().requires_grad_()
                result = ctx.compute(leaf)
                leaf_grad, *weight_grads = torch.autograd.grad(result, [leaf, *leaves], output_grad, allow_unused=True)
                input_grad.copy_(leaf_grad)
                for total, weight_grad in zip(sums, weight_grads, strict=True):
                    if weight_grad is not None:
                        total += weight_grad
                del result, leaf_grad, weight_grads
        grads = [total.to(tensor.dtype) for total, (*_, tensor) in zip(sums, trained, strict=True)]
        return grad_x, None, None, None, None, *grads
