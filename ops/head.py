"""Output head fused with its loss: sum over tokens of -log softmax(h W^T)[target], without materializing all logits.

Also the divergence between an adapted model and its base model, which share a head.

Legend: K tokens with a target, H hidden size, V vocabulary, C tokens per chunk, N trained rows. The head is frozen
except for a few rows (new tokens). The gradients dh = g W and dW = g^T h with g = softmax(h W^T) - onehot(target) are
computed in the forward pass, chunk by chunk, while the logits of the chunk are in memory (as in Liger's fused linear
cross-entropy, but without synchronizing with the device). Peak memory beyond h and dh: C V elements instead of K V in
fp32.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_LOGITS_PER_CHUNK = 2**27
"""Maximum number of logits in a chunk: 256 MiB in a 16-bit type, or 1,046 tokens for a vocabulary of 128,256."""
FP16_SCALE = 256.0
"""Scale for gradients stored in fp16 (smallest number 6e-8), so that probabilities down to 2e-10 do not underflow.
The head's weights may be at most 127, since |dh| <= 2 max |W|."""
MAX_ELEMENTS_PER_SCALING = 2**24
"""Number of fp16 gradient elements that are scaled in fp32 at once."""
MEASURES = LOSS, ENTROPY, COLLISION, BASE_LOSS, DIVERGENCE = range(5)
"""Rows returned by `measure_tokens`, with p from the model and q from the base model: -ln p(target), the entropy of p,
ln sum p^2, -ln q(target) and KL(p || q)."""
ROWS_AT_ONCE = 4096
"""Number of gradient rows that are weighted in fp32 at once."""


@dataclass(frozen=True)
class TrainedRows:
    """Trained rows of an otherwise frozen head: `values` [N, H] replace the rows `indices` [N] of its weight."""

    indices: Tensor
    values: Tensor


EAFT_TOKENS, EAFT_NATS = 20, 3.0
"""Number of tokens in EAFT's entropy, and the entropy's maximum, ln 20, rounded as in LLaMA-Factory."""


@dataclass(frozen=True)
class LossKind:
    """The loss of a token with probability p, where sg stops the gradient and a is the `parameter`.

    nll: -ln p. dft: -sg(p) ln p (arXiv:2508.05629). eaft: -sg((H / 3)^a) ln p, with H the entropy in nats of the 20
    most probable tokens, renormalized (LLaMA-Factory 0.9.5). focal: -(1 - p)^a ln p (arXiv:1708.02002).
    label_smoothing: (1 - a) times -ln p plus a times the mean -ln p of all tokens (torch's cross_entropy).
    """

    name: str = "nll"
    parameter: float = 0.0

    @property
    def smoothing(self) -> float:
        return self.parameter if self.name == "label_smoothing" else 0.0

    def summarize_logits(self, logits_CV: Tensor, targets: Tensor) -> Tensor | None:
        """Return the statistic of the logits [C] that `apply_weighting` needs, or None if it needs none.

        For eaft, this is the factor (H / 3)^a. For label_smoothing, it is the target's logit minus the mean logit.
        """
        if self.name == "eaft":
            top = logits_CV.topk(min(EAFT_TOKENS, logits_CV.shape[1])).values.float()
            return torch.special.entr(top.softmax(1)).sum(1).div_(EAFT_NATS).pow_(self.parameter)
        if self.smoothing:
            chosen = logits_CV.gather(1, targets.clamp(min=0)[:, None]).squeeze(1).float()
            return (chosen - logits_CV.mean(1, dtype=torch.float32)).masked_fill_(targets < 0, 0.0)
        return None

    def apply_weighting(self, nll: Tensor, statistic: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the losses [C], and their derivatives with respect to `nll`."""
        p = torch.exp(-nll)
        if self.name == "dft":
            return p * nll, p
        if self.name == "eaft" and statistic is not None:
            return statistic * nll, statistic
        if self.name == "focal":
            complement = -torch.expm1(-nll)
            weight = complement**self.parameter
            # nll / (1 - p) is 1 in the limit of p = 1, where (1 - p)^(a - 1) may be infinite.
            return weight * nll, weight * (1 + self.parameter * p * nll / complement.clamp(min=1e-30))
        return nll if statistic is None else nll + self.smoothing * statistic, torch.ones_like(nll)


NLL = LossKind()


def sum_token_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    factor: float = 1.0,
    rows: TrainedRows | None = None,
    kind: LossKind = NLL,
    token_weights: Tensor | None = None,
) -> Tensor:
    """Return sum_k w_k loss(p_k), with p_k = softmax(factor h_k W^T)[targets_k].

    hidden [K, H], weight [V, H] frozen, targets [K], w = `token_weights` [K] fp32 (None: 1); rows with a negative
    target are ignored. The loss of `kind` is in nats, fp32; differentiable in `hidden` and `rows.values`. Raises
    ValueError for mismatched shapes, or if the weight requires a gradient.
    """
    two_d = hidden.dim() == 2 and weight.dim() == 2
    if not two_d or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}: "
            "expected [K, H], [V, H] and [K]"
        )
    if weight.requires_grad:
        raise ValueError("weight.requires_grad=True: this loss does not compute a gradient for the head; freeze it")
    if factor != 1.0:
        hidden = hidden * factor
    indices, values = (rows.indices, rows.values) if rows is not None else (None, None)
    grad_enabled = torch.is_grad_enabled()
    return _TokenLossSum.apply(hidden, weight, targets, indices, values, grad_enabled, kind, token_weights)


def sum_token_losses_from_logits(
    logits_KV: Tensor, targets: Tensor, kind: LossKind = NLL, token_weights: Tensor | None = None
) -> Tensor:
    """Compute `sum_token_losses` from all logits; differentiable in the logits."""
    nll = F.cross_entropy(
        logits_KV.float(), targets.clamp(min=-1), ignore_index=-1, reduction="none", label_smoothing=kind.smoothing
    )
    plain = nll.detach()
    statistic = None if kind.smoothing else kind.summarize_logits(logits_KV.detach(), targets)
    losses, slopes = kind.apply_weighting(plain, statistic)
    if token_weights is not None:
        losses, slopes = losses * token_weights, slopes * token_weights
    return (losses + slopes * (nll - plain)).sum()


def measure_tokens(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    factor: float = 1.0,
    rows: TrainedRows | None = None,
    base_hidden: Tensor | None = None,
) -> Tensor:
    """Return every token's MEASURES in nats, fp32 [5, K].

    Without `base_hidden` [K, H], BASE_LOSS and DIVERGENCE are 0. The other arguments are as in `sum_token_losses`, with
    targets of at least 0. Only LOSS is differentiable, in `hidden` and `rows.values`. The backward pass recomputes the
    logits chunk by chunk, because each token's weight in the gradient is known only then.
    """
    if factor != 1.0:
        hidden, base_hidden = hidden * factor, None if base_hidden is None else base_hidden * factor
    trained = (rows.indices, rows.values) if rows is not None else (None, None)
    return _TokenMeasures.apply(hidden, base_hidden, weight, targets, *trained)


@torch.no_grad()
def measure_logits(logits_KV: Tensor, targets: Tensor, base_KV: Tensor | None = None) -> Tensor:
    """Return the MEASURES [5, K] from all logits, without a gradient."""
    measures = logits_KV.new_zeros(len(MEASURES), len(targets), dtype=torch.float32)
    if logits_KV.device.type != "cuda":
        _measure_in_torch(logits_KV, targets, base_KV, measures)
        return measures
    from ops.head_kernel import compute_cross_entropy, compute_divergences  # only torch's CUDA builds include triton

    compute_cross_entropy(logits_KV, targets, measures[LOSS], None, measures[ENTROPY : COLLISION + 1])
    if base_KV is not None:
        compute_cross_entropy(base_KV, targets, measures[BASE_LOSS], None)
        compute_divergences(logits_KV, base_KV, measures[DIVERGENCE], None)
    return measures


class _TokenMeasures(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, base_hidden: Tensor | None, weight: Tensor, targets: Tensor, *rows: Tensor | None
    ) -> Tensor:
        head, (tokens, vocabulary) = _Head(weight, rows[0], rows[1], None), (len(hidden), len(weight))
        matrices = 1 if base_hidden is None else 2
        copies = 1 if hidden.device.type == "cuda" else 6  # torch also allocates fp32 matrices
        size = max(1, min(tokens, MAX_LOGITS_PER_CHUNK // (matrices * copies * vocabulary)))
        storage, base_CV = hidden.new_empty(matrices, size, vocabulary), None
        measures = hidden.new_zeros(len(MEASURES), tokens, dtype=torch.float32)
        for start in range(0, tokens, size):
            chunk = slice(start, min(start + size, tokens))
            logits_CV = head.compute_logits(hidden[chunk], storage[0])
            if base_hidden is not None:
                base_CV = torch.mm(base_hidden[chunk], weight.t(), out=storage[1, : len(logits_CV)])
            measures[:, chunk] = measure_logits(logits_CV, targets[chunk], base_CV)
        ctx.save_for_backward(hidden, weight, targets, *rows)
        return measures

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_MK: Tensor) -> tuple[Tensor | None, ...]:
        grad_K = grad_MK[LOSS]
        hidden, weight, targets, indices, values = ctx.saved_tensors
        head = _Head(weight, indices, values, hidden)
        _compute_losses(head, hidden, targets, row_weights=grad_K)
        assert head.grad_hidden is not None and head.scale is not None
        for grad_CH, weights in zip(head.grad_hidden.split(ROWS_AT_ONCE), grad_K.split(ROWS_AT_ONCE), strict=True):
            grad_CH.copy_(grad_CH.float() * (weights / head.scale)[:, None])
        grad_values = None if head.grad_values is None else head.grad_values / head.scale
        return head.grad_hidden, None, None, None, None, grad_values


class _TokenLossSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        indices: Tensor | None,
        values: Tensor | None,
        grad_enabled: bool,
        kind: LossKind,
        token_weights: Tensor | None,
    ) -> Tensor:
        head = _Head(weight, indices, values, hidden if grad_enabled and any(ctx.needs_input_grad) else None)
        losses = _compute_losses(head, hidden, targets, kind, token_weights)
        ctx.save_for_backward(head.grad_hidden, head.grad_values)
        ctx.scale = head.scale
        return losses.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return *_build_input_gradients(ctx, grad_output), None, None


def _compute_losses(
    head: "_Head",
    hidden: Tensor,
    targets: Tensor,
    kind: LossKind = NLL,
    token_weights: Tensor | None = None,
    row_weights: Tensor | None = None,
) -> Tensor:
    """Return the weighted loss of every token [K], and accumulate the gradients in `head`.

    `row_weights` [K] apply only to the gradient of the trained rows.
    """
    tokens, vocabulary = hidden.shape[0], head.weight.shape[0]
    losses = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
    size = max(1, min(tokens, MAX_LOGITS_PER_CHUNK // vocabulary))
    storage = hidden.new_empty(size, vocabulary)
    for start in range(0, tokens, size):
        chunk = slice(start, min(start + size, tokens))
        logits_CV = head.compute_logits(hidden[chunk], storage)
        weights = None if token_weights is None else token_weights[chunk]
        _compute_chunk(kind, logits_CV, targets[chunk], weights, losses[chunk], head.scale)
        head.add_gradients(logits_CV, hidden, chunk, row_weights)
    return losses


class _Head:
    """Computes the logits of each chunk, and accumulates the gradients over the chunks."""

    def __init__(self, weight: Tensor, indices: Tensor | None, values: Tensor | None, hidden: Tensor | None) -> None:
        self.weight, self._indices, self._values = weight, indices, values
        self.grad_hidden = torch.empty_like(hidden) if hidden is not None else None
        self.grad_values = None
        if hidden is not None and values is not None:
            self.grad_values = torch.zeros_like(values, dtype=torch.float32)
        self.scale = None if hidden is None else FP16_SCALE if hidden.dtype == torch.float16 else 1.0

    def compute_logits(self, hidden_CH: Tensor, storage: Tensor) -> Tensor:
        logits_CV = torch.mm(hidden_CH, self.weight.t(), out=storage[: len(hidden_CH)])
        if self._indices is not None and self._values is not None:
            logits_CV.index_copy_(1, self._indices, hidden_CH @ self._values.to(hidden_CH.dtype).t())
        return logits_CV

    def add_gradients(self, grad_CV: Tensor, hidden: Tensor, chunk: slice, row_weights: Tensor | None = None) -> None:
        """Accumulate the gradients of a chunk; `grad_CV`, the gradient of its logits, is overwritten.

        `row_weights` [K] apply to the gradient of the trained rows, but not to the gradient of the hidden states.
        """
        if self.grad_hidden is None:
            return
        if self._indices is None or self._values is None or self.grad_values is None:
            torch.mm(grad_CV, self.weight, out=self.grad_hidden[chunk])
            return
        grad_CN = grad_CV.index_select(1, self._indices)
        torch.mm(grad_CV.index_fill_(1, self._indices, 0.0), self.weight, out=self.grad_hidden[chunk])
        self.grad_hidden[chunk].addmm_(grad_CN, self._values.to(grad_CN.dtype))
        hidden_CH = hidden[chunk].float()
        if row_weights is not None:
            hidden_CH = hidden_CH * row_weights[chunk, None]
        self.grad_values.addmm_(grad_CN.float().t(), hidden_CH)


def sum_divergences(
    hidden: Tensor, base_hidden: Tensor, weight: Tensor, *, factor: float = 1.0, rows: TrainedRows | None = None
) -> Tensor:
    """Return sum_k KL(p_k || q_k) in nats, fp32; p = softmax(factor h W^T), and q likewise for base_hidden.

    hidden, base_hidden [K, H], weight [V, H]; weight and base_hidden are frozen, and q is computed without the trained
    `rows`. The gradients, with g = p (ln p - ln q - KL), are computed chunk by chunk in the forward pass, as in
    `sum_token_losses`. Raises ValueError for mismatched shapes, or if a frozen tensor requires a gradient.
    """
    if hidden.dim() != 2 or hidden.shape != base_hidden.shape or hidden.shape[1:] != weight.shape[1:]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)}, base_hidden {tuple(base_hidden.shape)}, weight "
            f"{tuple(weight.shape)}: expected [K, H], [K, H] and [V, H]"
        )
    if weight.requires_grad or base_hidden.requires_grad:
        raise ValueError("the head or base_hidden requires a gradient: the divergence does not compute it; freeze it")
    if factor != 1.0:
        hidden, base_hidden = hidden * factor, base_hidden * factor
    indices, values = (rows.indices, rows.values) if rows is not None else (None, None)
    return _DivergenceSum.apply(hidden, base_hidden, weight, indices, values, torch.is_grad_enabled())


class _DivergenceSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        base_hidden: Tensor,
        weight: Tensor,
        indices: Tensor | None,
        values: Tensor | None,
        grad_enabled: bool,
    ) -> Tensor:
        tokens, vocabulary = hidden.shape[0], weight.shape[0]
        divergences = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
        head = _Head(weight, indices, values, hidden if grad_enabled and any(ctx.needs_input_grad) else None)
        on_gpu = hidden.device.type == "cuda"
        # The GPU kernel needs only the two matrices of logits; torch also allocates four fp32 matrices.
        compute_rows, matrices = (_compute_divergences_on_gpu, 2) if on_gpu else (_compute_divergences_in_torch, 12)
        size = max(1, min(tokens, MAX_LOGITS_PER_CHUNK // (matrices * vocabulary)))
        storage, base_storage = hidden.new_empty(2, size, vocabulary).unbind()
        for start in range(0, tokens, size):
            chunk = slice(start, min(start + size, tokens))
            logits_CV = head.compute_logits(hidden[chunk], storage)
            base_CV = torch.mm(base_hidden[chunk], weight.t(), out=base_storage[: len(logits_CV)])
            compute_rows(logits_CV, base_CV, divergences[chunk], head.scale)
            head.add_gradients(logits_CV, hidden, chunk)
        ctx.save_for_backward(head.grad_hidden, head.grad_values)
        ctx.scale = head.scale
        return divergences.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return _build_input_gradients(ctx, grad_output)


def _build_input_gradients(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    grad_KH, grad_NH = ctx.saved_tensors
    grad_values = None if grad_NH is None else grad_NH * (grad_output / ctx.scale)
    if grad_KH.dtype != torch.float16:
        return grad_KH * grad_output.to(grad_KH.dtype), None, None, None, grad_values, None
    # With fp16, `grad_output` contains the loss scale and may exceed fp16's range.
    result = torch.empty_like(grad_KH)
    rows = max(1, MAX_ELEMENTS_PER_SCALING // grad_KH.shape[1])
    for source, target in zip(grad_KH.split(rows), result.split(rows), strict=True):
        target.copy_(source.float() * (grad_output / FP16_SCALE))
    return result, None, None, None, grad_values, None


def _compute_chunk(
    kind: LossKind, logits_CV: Tensor, targets: Tensor, weights: Tensor | None, losses: Tensor, scale: float | None
) -> None:
    """Write each row's weighted loss. With `scale`, overwrite the logits with their gradient times `scale`."""
    statistic = kind.summarize_logits(logits_CV, targets)
    if logits_CV.device.type == "cuda":
        from ops.head_kernel import compute_cross_entropy  # only torch's CUDA builds include triton

        compute_cross_entropy(logits_CV, targets, losses, scale)
    else:
        _compute_cross_entropy_in_torch(logits_CV, targets, losses, scale)
    if kind == NLL and weights is None:
        return
    values, slopes = kind.apply_weighting(losses, statistic)
    if scale is not None and kind.smoothing:
        # The target is (1 - a) onehot + a / V.
        spread = kind.smoothing * scale * (targets >= 0)
        logits_CV.sub_((spread / logits_CV.shape[1])[:, None])
        logits_CV[torch.arange(len(targets), device=targets.device), targets.clamp(min=0)] += spread.to(logits_CV.dtype)
    if weights is not None:
        values, slopes = values * weights, slopes * weights
    losses.copy_(values)
    if scale is not None:
        logits_CV.mul_(slopes[:, None])


def _compute_cross_entropy_in_torch(logits_CV: Tensor, targets: Tensor, losses: Tensor, scale: float | None) -> None:
    """Write each row's loss to `losses`. With `scale`, overwrite the logits with their gradient times `scale`."""
    log_probabilities = torch.log_softmax(logits_CV.float(), dim=1)
    chosen, counted = targets.clamp(min=0)[:, None], targets >= 0
    losses.copy_(-log_probabilities.gather(1, chosen).squeeze(1)).masked_fill_(~counted, 0.0)
    if scale is not None:
        gradient = log_probabilities.exp_()
        gradient.scatter_add_(1, chosen, gradient.new_full((len(targets), 1), -1.0))
        logits_CV.copy_(gradient.mul_(counted[:, None] * scale))


def _compute_divergences_in_torch(logits_CV: Tensor, base_CV: Tensor, divergences: Tensor, scale: float | None) -> None:
    """Write each row's divergence. With `scale`, overwrite the logits with their gradient times `scale`."""
    log_p_CV = torch.log_softmax(logits_CV.float(), dim=1)
    difference_CV = log_p_CV - torch.log_softmax(base_CV.float(), dim=1)
    p_CV = log_p_CV.exp_()
    divergences.copy_((p_CV * difference_CV).sum(1))
    if scale is not None:
        logits_CV.copy_(difference_CV.sub_(divergences[:, None]).mul_(p_CV).mul_(scale))


def _compute_divergences_on_gpu(logits_CV: Tensor, base_CV: Tensor, divergences: Tensor, scale: float | None) -> None:
    from ops.head_kernel import compute_divergences  # only torch's CUDA builds include triton

    compute_divergences(logits_CV, base_CV, divergences, scale)


def _measure_in_torch(logits_CV: Tensor, targets: Tensor, base_CV: Tensor | None, measures: Tensor) -> None:
    log_p_CV = torch.log_softmax(logits_CV.float(), 1)
    p_CV, chosen = log_p_CV.exp(), targets[:, None]
    measures[LOSS] = -log_p_CV.gather(1, chosen).squeeze(1)
    measures[ENTROPY] = -(p_CV * log_p_CV).sum(1)
    measures[COLLISION] = p_CV.square().sum(1).log()
    if base_CV is not None:
        log_q_CV = torch.log_softmax(base_CV.float(), 1)
        measures[BASE_LOSS] = -log_q_CV.gather(1, chosen).squeeze(1)
        measures[DIVERGENCE] = (p_CV * log_p_CV.sub_(log_q_CV)).sum(1)
