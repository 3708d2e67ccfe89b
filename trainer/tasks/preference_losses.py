"""Losses on preference pairs, with TRL's names, as functions of the answers' log-probabilities.

Legend: P pairs; log p(y) the sum of the log-probabilities of an answer's tokens, n(y) their number,
h(y) = log p(y) - log p_ref(y). In `LOSSES`, c and r are beta h for the chosen and the rejected answer, p the settings.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.config.task_sections import PreferenceSection


@dataclass(frozen=True)
class PairScores:
    """Log-probabilities (in nats) and token counts of the answers in P pairs, each fp32 [P]."""

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @property
    def log_ratios(self) -> tuple[Tensor, Tensor]:
        """Log-ratios h for the chosen and the rejected answer."""
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected

    @property
    def mean_logps(self) -> tuple[Tensor, Tensor]:
        """Log-probabilities per token, log p / n, of the chosen and the rejected answer."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


def compute_pair_losses(scores: PairScores, settings: PreferenceSection) -> Tensor:
    """Return the weighted sum of the configured losses for each pair [P]."""
    c, r = (settings.beta * ratio for ratio in scores.log_ratios)
    losses = [weight * LOSSES[name](c, r, scores, settings) for name, weight in settings.loss.items()]
    return torch.stack(losses).sum(0)


def _compute_smoothed_loss(logits: Tensor, smoothing: float) -> Tensor:
    return -(1.0 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)


def _compute_robust_loss(logits: Tensor, noise: float) -> Tensor:
    return (noise * F.logsigmoid(-logits) - (1.0 - noise) * F.logsigmoid(logits)) / (1.0 - 2.0 * noise)


def _compute_exo_pair_loss(logits: Tensor, noise: float) -> Tensor:
    better = logits.sigmoid() * (F.logsigmoid(logits) - math.log1p(-noise))
    return better + (-logits).sigmoid() * (F.logsigmoid(-logits) - math.log(noise))


def _compute_discopop_loss(logits: Tensor, tau: float) -> Tensor:
    weight = (logits / tau).sigmoid()
    return -F.logsigmoid(logits) * (1.0 - weight) + torch.exp(-logits) * weight


def _compute_orpo_loss(scores: PairScores, beta: float) -> Tensor:
    chosen, rejected = scores.mean_logps
    odds = (chosen - rejected) - (torch.log(-torch.expm1(chosen)) - torch.log(-torch.expm1(rejected)))
    return -chosen - beta * F.logsigmoid(odds)


LOSSES: dict[str, Callable[[Tensor, Tensor, PairScores, PreferenceSection], Tensor]] = {
    # Rafailov et al. 2023, with the smoothing of cDPO (Mitchell 2023)
    "dpo": lambda c, r, scores, p: _compute_smoothed_loss(c - r, p.label_smoothing),
    # Zhao et al. 2023 (SLiC)
    "hinge": lambda c, r, scores, p: torch.relu(1.0 - (c - r)),
    # Azar et al. 2023, with h per token
    "ipo": lambda c, r, scores, p: (((c / scores.chosen_tokens - r / scores.rejected_tokens) - 0.5) / p.beta).square(),
    # Chowdhury et al. 2024
    "robust": lambda c, r, scores, p: _compute_robust_loss(c - r, p.label_smoothing),
    # Ji et al. 2024
    "exo_pair": lambda c, r, scores, p: _compute_exo_pair_loss(c - r, p.label_smoothing),
    # Chen et al. 2024
    "nca_pair": lambda c, r, scores, p: -F.logsigmoid(c) - 0.5 * (F.logsigmoid(-c) + F.logsigmoid(-r)),
    # Jung et al. 2024, without the shift of rewards
    "bco_pair": lambda c, r, scores, p: -F.logsigmoid(c) - F.logsigmoid(-r),
    # Wu et al. 2024, with hard labels
    "sppo_hard": lambda c, r, scores, p: ((c - 0.5) / p.beta).square() + ((r + 0.5) / p.beta).square(),
    # D'Oosterlinck et al. 2024, for answers that are better than the model's
    "apo_zero": lambda c, r, scores, p: (-c).sigmoid() + r.sigmoid(),
    # D'Oosterlinck et al. 2024, for answers that are worse than the model's
    "apo_down": lambda c, r, scores, p: c.sigmoid() + (r - c).sigmoid(),
    # Lu et al. 2024
    "discopop": lambda c, r, scores, p: _compute_discopop_loss(c - r, p.discopop_tau),
    # Xu et al. 2024: DPO's loss without a reference, plus the loss on the chosen answer
    "cpo": lambda c, r, scores, p: (
        _compute_smoothed_loss(p.beta * (scores.chosen - scores.rejected), p.label_smoothing) - scores.mean_logps[0]
    ),
    # Meng et al. 2024
    "simpo": lambda c, r, scores, p: _compute_smoothed_loss(
        p.beta * (scores.mean_logps[0] - scores.mean_logps[1]) - p.gamma, p.label_smoothing
    ),
    # Hong et al. 2024: the loss on the chosen answer, plus beta times the odds-ratio loss
    "orpo": lambda c, r, scores, p: _compute_orpo_loss(scores, p.beta),
    # Pang et al. 2024 (RPO's second term): -log p(c) / n(c)
    "sft": lambda c, r, scores, p: -scores.mean_logps[0],
}
