"""Cross-entropy and divergence of rows of logits in Triton: one program per row, two passes.

The gradient overwrites the logits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_V = 8192
WARPS = 8


@triton.jit
def _update_maximum(maximum, value):  # type: ignore[no-untyped-def]
    """Return the new maximum of each lane, and the value to subtract before exp.

    The latter is 0 for a lane without values: its maximum is -inf, and exp(-inf - -inf) is NaN.
    """
    larger = tl.maximum(maximum, value)
    return larger, tl.where(larger == -float("inf"), 0.0, larger)


@triton.jit
def _cross_entropy_row(  # type: ignore[no-untyped-def]
    logits, targets, losses, measures, stride, vocabulary, scale, GRADIENT: tl.constexpr, MEASURED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    has_target = target >= 0
    # Running maximum and sum of exponentials for each lane; the lanes are combined after the pass.
    maximum = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)  # like `total`, with each exponential times its logit
    squared = tl.zeros((BLOCK,), tl.float32)  # like `total`, with the square of each exponential
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(logits + column, mask=column < vocabulary, other=-float("inf")).to(tl.float32)
        larger, shift = _update_maximum(maximum, value)
        decay = tl.exp(maximum - shift)
        exponential = tl.exp(value - shift)
        total = total * decay + exponential
        if MEASURED:
            weighted = weighted * decay + exponential * tl.where(column < vocabulary, value, 0.0)
            squared = squared * decay * decay + exponential * exponential
        maximum = larger
    top = tl.max(maximum, 0)
    decay = tl.exp(maximum - top)
    total_sum = tl.sum(total * decay, 0)
    log_sum = tl.log(total_sum) + top
    if MEASURED:
        tl.store(measures + row, log_sum - tl.sum(weighted * decay, 0) / total_sum)
        tl.store(
            measures + tl.num_programs(0) + row, tl.log(tl.sum(squared * decay * decay, 0)) - 2 * tl.log(total_sum)
        )
    chosen = tl.load(logits + tl.where(has_target, target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(has_target, log_sum - chosen, 0.0))
    if GRADIENT:
        weight = tl.where(has_target, scale, 0.0)
        tl.debug_barrier()  # the target's logit is read before it is overwritten
        for start in range(0, vocabulary, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < vocabulary
            value = tl.load(logits + column, mask=inside, other=-float("inf")).to(tl.float32)
            gradient = weight * (tl.exp(value - log_sum) - tl.where(column == target, 1.0, 0.0))
            tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=inside)


def compute_cross_entropy(
    logits_CV: Tensor, targets: Tensor, losses: Tensor, scale: float | None, measures: Tensor | None = None
) -> None:
    """Compute losses_c = log sum exp(logits_c) - logits_c[target_c]; overwrite logits with scale (softmax - onehot).

    Both are zero for rows with a negative target. The entropy and ln sum p^2 are written to `measures` [2, C], which
    must be contiguous.
    """
    with torch.cuda.device(logits_CV.device):
        _cross_entropy_row[(logits_CV.shape[0],)](
            logits_CV, targets, losses, losses if measures is None else measures, logits_CV.stride(0),
            logits_CV.shape[1], scale or 1.0, GRADIENT=scale is not None, MEASURED=measures is not None,
            BLOCK=BLOCK_V if measures is None else BLOCK_V // 2, num_warps=WARPS,
        )  # fmt: skip


@triton.jit
def _divergence_row(  # type: ignore[no-untyped-def]
    logits, base_logits, divergences, stride, base_stride, vocabulary, scale, GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    base_logits += row * base_stride
    maximum = tl.full((BLOCK,), -float("inf"), tl.float32)
    base_maximum = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    base_total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)  # like `total`, with each exponential times logit - base logit
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocabulary
        value = tl.load(logits + column, mask=inside, other=-float("inf")).to(tl.float32)
        base = tl.load(base_logits + column, mask=inside, other=-float("inf")).to(tl.float32)
        larger, shift = _update_maximum(maximum, value)
        decay = tl.exp(maximum - shift)
        exponential = tl.exp(value - shift)
        total = total * decay + exponential
        weighted = weighted * decay + exponential * tl.where(inside, value - base, 0.0)
        maximum = larger
        larger, shift = _update_maximum(base_maximum, base)
        base_total = base_total * tl.exp(base_maximum - shift) + tl.exp(base - shift)
        base_maximum = larger
    top = tl.max(maximum, 0)
    base_top = tl.max(base_maximum, 0)
    decay = tl.exp(maximum - top)
    total_sum = tl.sum(total * decay)
    mean = tl.sum(weighted * decay) / total_sum  # of logit - base logit, under p
    log_sum = tl.log(total_sum) + top
    base_sum = tl.sum(base_total * tl.exp(base_maximum - base_top))
    # Subtract maxima and sums separately: the difference of two large, nearly equal numbers would lose precision.
    tl.store(divergences + row, mean - (top - base_top) - tl.log(total_sum / base_sum))
    if GRADIENT:
        for start in range(0, vocabulary, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < vocabulary
            value = tl.load(logits + column, mask=inside, other=-float("inf")).to(tl.float32)
            base = tl.load(base_logits + column, mask=inside, other=0.0).to(tl.float32)
            gradient = scale * tl.exp(value - log_sum) * (value - base - mean)
            tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=inside)


def compute_divergences(logits_CV: Tensor, base_CV: Tensor, divergences: Tensor, scale: float | None) -> None:
    """Compute divergences_c = KL(p_c || q_c), with p and q the softmax of logits_c and base_c.

    Unless `scale` is None, the gradient scale p (ln p - ln q - KL) overwrites the logits.
    """
    with torch.cuda.device(logits_CV.device):
        _divergence_row[(logits_CV.shape[0],)](
            logits_CV, base_CV, divergences, logits_CV.stride(0), base_CV.stride(0), logits_CV.shape[1], scale or 1.0,
            GRADIENT=scale is not None, BLOCK=BLOCK_V // 2, num_warps=WARPS,
        )  # fmt: skip
