"""One optimizer step: micro-batches in, the globally token-weighted loss and its gradient out.

The loss of a step is the sum of the token losses over all ranks and micro-steps divided by the number of target tokens
over all ranks and micro-steps, so that neither padding nor the way a batch is cut changes the gradient. DeepSpeed
divides by the accumulation steps and averages over ranks; each micro-step therefore hands it
sum_local * world * accumulation / N.
"""

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from trainer.attention import VARLEN
from trainer.ranks import Ranks, sum_over_ranks
from trainer.steering import Steering

MicroBatch = dict[str, Any]
IGNORED = -100


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did: sums over all ranks and micro-steps."""

    loss_sum: torch.Tensor
    """Sum of token losses, nats; on the device."""
    target_tokens: int
    """Tokens with loss."""
    tokens: int
    """All tokens, prompts included."""
    grad_norm: float
    """Global gradient norm before clipping."""
    applied: bool
    """False if the step was skipped because a gradient was not finite."""
    stop: bool
    """True on every rank if any rank asked to stop."""


class TokenLoss:
    """The sum of token losses of a micro-batch, with logits only where there are targets."""

    def __init__(self, module: torch.nn.Module) -> None:
        base: Any = module
        if hasattr(module, "get_base_model"):
            base = base.get_base_model()
        # Only our own variable-length attention takes document bounds; transformers' reads them off position_ids.
        self._takes_bounds = base.config._attn_implementation == VARLEN
        self._picks_logits = "logits_to_keep" in inspect.signature(base.forward).parameters

    def __call__(self, model: Any, batch: MicroBatch, device: torch.device) -> torch.Tensor:
        """sum_t -log p(target_t) over the targets of the batch, nats, fp32."""
        logits, targets = self._logits(model, batch, device)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")

    def by_row(self, model: Any, batch: MicroBatch, device: torch.device) -> torch.Tensor:
        """The same for each row of the batch alone, nats, fp64 [B]."""
        logits, targets = self._logits(model, batch, device)
        # A row at a time: logits of the whole batch in 32 bits would double the peak.
        rows = [
            F.cross_entropy(row.float(), target, ignore_index=IGNORED, reduction="sum")
            for row, target in zip(logits, targets, strict=True)
        ]
        return torch.stack(rows).double()

    def _logits(self, model: Any, batch: MicroBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [B, K, V] and targets [B, K] on the device.

        Positions without a target in any row are left out of the output head, which for small models and short answers
        is most of its work.
        """
        left_out = ("targets",) if self._takes_bounds else ("targets", "cu_seqlens", "max_seqlen")
        inputs = {key: _to(value, device) for key, value in batch.items() if key not in left_out}
        targets = batch["targets"]
        if self._picks_logits:
            kept = (targets != IGNORED).any(0).nonzero().squeeze(1)
            kept = kept if kept.numel() else torch.zeros(1, dtype=torch.long)
            targets = targets[:, kept]
            inputs["logits_to_keep"] = kept.to(device)
        return model(**inputs, use_cache=False).logits, _to(targets, device)


def count_targets(batches: list[MicroBatch]) -> int:
    """Tokens with loss in this rank's micro-batches."""
    return sum(int((batch["targets"] != IGNORED).sum()) for batch in batches)


def count_tokens(batches: list[MicroBatch]) -> int:
    """Tokens that are not padding in this rank's micro-batches."""
    return sum(
        int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel()
        for batch in batches
    )


def train_step(
    engine: Any,
    token_loss: TokenLoss,
    batches: list[MicroBatch],
    ranks: Ranks,
    *,
    step: int,
    max_grad_norm: float,
    steering: Steering | None = None,
    stop: bool = False,
) -> StepResult:
    """Forward, backward and optimizer over all micro-batches of step `step` (from 1); every rank must call it.

    `steering` adds its term, nats per token, once per step. `stop` says that this rank wants to end after the step; the
    result says whether any rank does.
    """
    device = engine.device
    counts = torch.tensor([count_targets(batches), count_tokens(batches), stop], device=device, dtype=torch.float64)
    target_tokens, tokens, stops = (int(count) for count in sum_over_ranks(counts).tolist())
    # What undoes the engine's division by accumulation steps and ranks.
    to_engine = ranks.world_size * len(batches) / max(target_tokens, 1)
    sums = torch.zeros(2, device=device, dtype=torch.float64)
    plain_norm = None
    skipped_before = engine.skipped_steps
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        loss_local = token_loss(engine, batch, device)
        sums[0] += loss_local.detach()
        total = loss_local * to_engine
        if is_last and steering is not None:
            # Every rank adds the whole term and the engine averages over ranks: only the accumulation is undone.
            total = total + steering.term(step) * len(batches)
            sums[1] = steering.squares_local()
        engine.backward(total)
        if is_last:
            sum_over_ranks(sums)
            plain_norm = _guard_plain_optimizer(engine, max_grad_norm)
        engine.step()
    if plain_norm is None:
        grad_norm = float(engine.get_global_grad_norm() or 0.0)
        applied = engine.skipped_steps == skipped_before
    else:
        grad_norm, applied = plain_norm, math.isfinite(plain_norm)
    if steering is not None and applied:
        steering.observe(step, sums[0], target_tokens, sums[1])
    return StepResult(sums[0], target_tokens, tokens, grad_norm, applied, stops > 0)


def _guard_plain_optimizer(engine: Any, max_grad_norm: float) -> float | None:
    """Stage 0 in 32 bits has no wrapper that measures, clips and skips: do it here; None for the other engines.

    torch's AdamW leaves parameters without a gradient alone, so dropping the gradients skips the step.
    """
    if engine.optimizer is not engine.basic_optimizer:
        return None
    parameters = [parameter for parameter in engine.module.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    if not math.isfinite(norm):
        engine.optimizer.zero_grad(set_to_none=True)
    elif max_grad_norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    return float(norm)


@torch.no_grad()
def evaluate_loss(engine: Any, token_loss: TokenLoss, batches: Any) -> tuple[float, int]:
    """Held-out loss, nats per target token over all ranks, and the number of target tokens; every rank must call it."""
    sums = torch.zeros(2, device=engine.device, dtype=torch.float64)
    engine.eval()
    for batch in batches:
        sums[0] += token_loss(engine, batch, engine.device)
        sums[1] += count_targets([batch])
    engine.train()
    loss_sum, target_tokens = sum_over_ranks(sums).tolist()
    return loss_sum / max(target_tokens, 1.0), int(target_tokens)


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
