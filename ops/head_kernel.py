"""Cross-entropy of rows of logits in Triton: one program a row, two passes, the gradient in place of the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_V = 8192
WARPS = 8


@triton.jit
def _cross_entropy_row(logits, targets, losses, stride, vocabulary, scale, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    counted = target >= 0
    # Running maximum and sum of exponentials for each lane; the lanes meet after the pass.
    maximum = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(logits + column, mask=column < vocabulary, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(maximum, value)
        # A lane that has seen nothing yet keeps -inf, and exp(-inf - -inf) is no number.
        shift = tl.where(larger == -float("inf"), 0.0, larger)
        total = total * tl.exp(maximum - shift) + tl.exp(value - shift)
        maximum = larger
    top = tl.max(maximum, 0)
    normaliser = tl.log(tl.sum(total * tl.exp(maximum - top), 0)) + top
    chosen = tl.load(logits + tl.where(counted, target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(counted, normaliser - chosen, 0.0))
    if GRADIENT:
        weight = tl.where(counted, scale, 0.0)
        tl.debug_barrier()  # the target's logit is read before it is overwritten
        for start in range(0, vocabulary, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < vocabulary
            value = tl.load(logits + column, mask=inside, other=-float("inf")).to(tl.float32)
            gradient = weight * (tl.exp(value - normaliser) - tl.where(column == target, 1.0, 0.0))
            tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=inside)


def cross_entropy_rows(logits_CV: Tensor, targets: Tensor, losses: Tensor, scale: float | None) -> None:
    """losses_c = log sum exp(logits_c) - logits_c[target_c]; scaled softmax - onehot then takes its place.

    Of a row whose target is negative both are zero.
    """
    with torch.cuda.device(logits_CV.device):
        _cross_entropy_row[(logits_CV.shape[0],)](
            logits_CV,
            targets,
            losses,
            logits_CV.stride(0),
            logits_CV.shape[1],
            scale or 1.0,
            GRADIENT=scale is not None,
            BLOCK=BLOCK_V,
            num_warps=WARPS,
        )
