"""The output head and its loss in one: sum over tokens of -log softmax(h W^T)[target], without all logits at once.

The same for the divergence between two models that share a head, an adapted one and its base.

Legend: K tokens with a target, H hidden size, V vocabulary, C tokens of a chunk. The head is frozen, so that its only
gradient is dh = (softmax(h W^T) - onehot(target)) W, which is computed in the forward pass, chunk by chunk, while the
logits of the chunk are there (the idea of Liger's fused linear cross-entropy; unlike it, nothing here waits for the
device). Peak memory beyond h and dh: C V elements, in place of K V in 32 bits.
"""

from typing import Any

import torch
from torch import Tensor

LOGITS_AT_ONCE = 2**27
"""Elements of a chunk's logits: 256 MiB in 16 bits, and 1,024 tokens of a vocabulary of 128,256."""
FP16_SCALE = 256.0
"""On gradients that are kept in fp16, whose least number is 6e-8: probabilities down to 2e-10 then count. It bounds the
head's weights by 127, for |dh| <= 2 max |W|."""
NARROWED_AT_ONCE = 2**24
"""Elements of fp16 gradients that are multiplied in 32 bits at a time."""


def token_loss_sum(hidden: Tensor, weight: Tensor, targets: Tensor, *, factor: float = 1.0) -> Tensor:
    """-sum_k log softmax(factor h_k W^T)[targets_k], nats, fp32, differentiable in `hidden`.

    hidden [K, H], weight [V, H] frozen, targets [K]; a row whose target is negative counts nothing. Raises ValueError
    for shapes that do not fit and for a weight that wants a gradient.
    """
    two_d = hidden.dim() == 2 and weight.dim() == 2
    if not two_d or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}: "
            "expected [K, H], [V, H] and [K]"
        )
    if weight.requires_grad:
        raise ValueError("weight.requires_grad=True: this loss has no gradient of the head; freeze it")
    if factor != 1.0:
        hidden = hidden * factor
    loss: Tensor = _TokenLossSum.apply(hidden, weight, targets, hidden.requires_grad and torch.is_grad_enabled())
    return loss


class _TokenLossSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, with_gradient: bool) -> Tensor:
        tokens, vocabulary = hidden.shape[0], weight.shape[0]
        losses = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
        grad_KH = torch.empty_like(hidden) if with_gradient else None
        size = max(1, min(tokens, LOGITS_AT_ONCE // vocabulary))
        storage = hidden.new_empty(size, vocabulary)
        rows = _rows_on_gpu if hidden.device.type == "cuda" else _rows_in_torch
        scale = _scale_of(hidden.dtype) if with_gradient else None
        for start in range(0, tokens, size):
            end = min(start + size, tokens)
            logits_CV = torch.mm(hidden[start:end], weight.t(), out=storage[: end - start])
            rows(logits_CV, targets[start:end], losses[start:end], scale)
            if grad_KH is not None:
                torch.mm(logits_CV, weight, out=grad_KH[start:end])
        ctx.save_for_backward(*([grad_KH] if grad_KH is not None else []))
        return losses.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (grad_KH,) = ctx.saved_tensors
        return _times(grad_KH, grad_output), None, None, None


def divergence_sum(hidden: Tensor, base_hidden: Tensor, weight: Tensor, *, factor: float = 1.0) -> Tensor:
    """sum_k KL(p_k || q_k), nats, fp32, with p = softmax(factor h W^T) and q the same of base_hidden.

    hidden, base_hidden [K, H], weight [V, H], frozen as base_hidden is. The gradient, dh = p (ln p - ln q - KL) W, is
    computed with the value, chunk by chunk, as that of `token_loss_sum` is. Raises ValueError for shapes that do not
    fit.
    """
    if hidden.dim() != 2 or hidden.shape != base_hidden.shape or hidden.shape[1:] != weight.shape[1:]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, base_hidden {tuple(base_hidden.shape)}, weight {tuple(weight.shape)}: "
            "expected [K, H], [K, H] and [V, H]"
        )
    if weight.requires_grad or base_hidden.requires_grad:
        raise ValueError("the head or base_hidden requires a gradient: this divergence has one of hidden alone")
    if factor != 1.0:
        hidden, base_hidden = hidden * factor, base_hidden * factor
    with_gradient = hidden.requires_grad and torch.is_grad_enabled()
    divergence: Tensor = _DivergenceSum.apply(hidden, base_hidden, weight, with_gradient)
    return divergence


class _DivergenceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, base_hidden: Tensor, weight: Tensor, with_gradient: bool) -> Tensor:
        tokens, vocabulary = hidden.shape[0], weight.shape[0]
        divergences = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
        grad_KH = torch.empty_like(hidden) if with_gradient else None
        on_gpu = hidden.device.type == "cuda"
        # On a GPU both logits alone are there at once, in torch four matrices of 32 bits as well.
        rows, matrices = (_divergences_on_gpu, 2) if on_gpu else (_divergences_in_torch, 12)
        size = max(1, min(tokens, LOGITS_AT_ONCE // (matrices * vocabulary)))
        storage, base_storage = hidden.new_empty(2, size, vocabulary).unbind()
        scale = _scale_of(hidden.dtype) if with_gradient else None
        for start in range(0, tokens, size):
            end = min(start + size, tokens)
            logits_CV = torch.mm(hidden[start:end], weight.t(), out=storage[: end - start])
            base_CV = torch.mm(base_hidden[start:end], weight.t(), out=base_storage[: end - start])
            rows(logits_CV, base_CV, divergences[start:end], scale)
            if grad_KH is not None:
                torch.mm(logits_CV, weight, out=grad_KH[start:end])
        ctx.save_for_backward(*([grad_KH] if grad_KH is not None else []))
        return divergences.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (grad_KH,) = ctx.saved_tensors
        return _times(grad_KH, grad_output), None, None, None


def _scale_of(dtype: torch.dtype) -> float:
    return FP16_SCALE if dtype == torch.float16 else 1.0


def _times(grad_KH: Tensor, grad_output: Tensor) -> Tensor:
    """The unscaled gradient times a number that in fp16 contains the loss scale and may exceed fp16's range."""
    if grad_KH.dtype != torch.float16:
        return grad_KH * grad_output.to(grad_KH.dtype)
    result = torch.empty_like(grad_KH)
    rows = max(1, NARROWED_AT_ONCE // grad_KH.shape[1])
    for kept, narrowed in zip(grad_KH.split(rows), result.split(rows), strict=True):
        narrowed.copy_(kept.float() * (grad_output / FP16_SCALE))
    return result


def _rows_in_torch(logits_CV: Tensor, targets: Tensor, losses: Tensor, scale: float | None) -> None:
    """Losses of the rows, and in place of the logits their gradient times `scale`, if there is one."""
    log_probabilities = torch.log_softmax(logits_CV.float(), dim=1)
    chosen, counted = targets.clamp(min=0)[:, None], targets >= 0
    losses.copy_(-log_probabilities.gather(1, chosen).squeeze(1)).masked_fill_(~counted, 0.0)
    if scale is not None:
        gradient = log_probabilities.exp_()
        gradient.scatter_add_(1, chosen, gradient.new_full((len(targets), 1), -1.0))
        logits_CV.copy_(gradient.mul_(counted[:, None] * scale))


def _rows_on_gpu(logits_CV: Tensor, targets: Tensor, losses: Tensor, scale: float | None) -> None:
    from ops.head_kernel import cross_entropy_rows  # triton comes with torch's CUDA builds only

    cross_entropy_rows(logits_CV, targets, losses, scale)


def _divergences_in_torch(logits_CV: Tensor, base_CV: Tensor, divergences: Tensor, scale: float | None) -> None:
    """Divergences of the rows, and in place of the logits their gradient times `scale`, if there is one."""
    log_p_CV = torch.log_softmax(logits_CV.float(), dim=1)
    difference_CV = log_p_CV - torch.log_softmax(base_CV.float(), dim=1)
    p_CV = log_p_CV.exp_()
    divergences.copy_((p_CV * difference_CV).sum(1))
    if scale is not None:
        logits_CV.copy_(difference_CV.sub_(divergences[:, None]).mul_(p_CV).mul_(scale))


def _divergences_on_gpu(logits_CV: Tensor, base_CV: Tensor, divergences: Tensor, scale: float | None) -> None:
    from ops.head_kernel import divergence_rows  # triton comes with torch's CUDA builds only

    divergence_rows(logits_CV, base_CV, divergences, scale)
