"""Losses of preference pairs by the names of TRL, as functions of log-probabilities of whole answers.

Legend: P pairs; c and r the chosen and the rejected answer, log p(y) the sum of their tokens' log-probabilities,
h(y) = log p(y) - log p_ref(y), and n(y) the number of tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.config.preference_section import PreferenceSection


@dataclass(frozen=True)
class PairScores:
    """Log-probabilities of the answers of P pairs in nats, fp32 [P]."""

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @property
    def ratios(self) -> tuple[Tensor, Tensor]:
        """Return h of both answers."""
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """Return log p of both answers per token."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


def pair_losses(scores: PairScores, settings: PreferenceSection) -> Tensor:
    """Return the weighted sum of the configured losses of each pair [P]."""
    losses = [weight * LOSSES[name](scores, settings) for name, weight in settings.loss.items()]
    return torch.stack(losses).sum(0)


def _smoothed(logits: Tensor, smoothing: float) -> Tensor:
    return -(1.0 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)


def _dpo(scores: PairScores, settings: PreferenceSection) -> Tensor:
    """Rafailov et al. 2023, with the smoothing of cDPO (Mitchell 2023)."""
    chosen, rejected = scores.ratios
    return _smoothed(settings.beta * (chosen - rejected), settings.label_smoothing)


def _hinge(scores: PairScores, settings: PreferenceSection) -> Tensor:
    """Zhao et al. 2023 (SLiC)."""
    chosen, rejected = scores.ratios
    return torch.relu(1.0 - settings.beta * (chosen - rejected))


def _ipo(scores: PairScores, settings: PreferenceSection) -> Tensor:
    """Azar et al. 2023, with h per token."""
    chosen, rejected = scores.ratios
    difference = chosen / scores.chosen_tokens - rejected / scores.rejected_tokens
    return (difference - 0.5 / settings.beta) ** 2


def _robust(scores: PairScores, settings: PreferenceSection) -> Tensor:
    """Chowdhury et al. 2024."""
    chosen, rejected = scores.ratios
    logits, noise = settings.beta * (chosen - rejected), settings.label_smoothing
    return (noise * F.logsigmoid(-logits) - (1.0 - noise) * F.logsigmoid(logits)) / (1.0 - 2.0 * noise)


def _exo_pair(scores: PairScores, settings: PreferenceSection) -> Tensor:
    """Ji et al. 2024."""
    chosen, rejected = scores.ratios
    logits, noise = settings.beta * (chosen - rejected), settings.label_smoothing
    better = logits.sigmoid() * (F.logsigmoid(logits) - math.log1p(-noise))
    return better + (-logits).sigmoid() * (F.logsigmoid(-logits) - math.log(noise))


def _nca_pair(scores: PairScores, settings: PreferenceSection) -> Tensor:
    """Chen et al. 2024."""
    chosen, rejected = (settings.beta * ratio for ratio in scores.ratios)
    return -F.logsigmoid(chosen) - 0.5 * (F.logsigmoid(-chosen) + F.logsigmoid(-rejected))


def _bco_pair(scores: PairScores, settings: PreferenceSection) -> Tensor:
    """Jung et al. 2024, without the shift of rewards."""
    chosen, rejected = (settings.beta * ratio for ratio in scores.ratios)
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def _sppo_hard(scores: PairScores, settings: PreferenceSection) -> Tensor:
    """Wu et al. 2024, with hard labels."""
    chosen, rejected = scores.ratios
    return (chosen - 0.5 / settings.beta) ** 2 + (rejected + 0.5 / settings.beta) ** 2


def _apo_zero(scores: PairScores, settings: PreferenceSection) -> Tensor:
    """D'Oosterlinck et al. 2024, for answers that are better than the model's."""
    chosen, rejected = (settings.beta * ratio for ratio in scores.ratios)
    return (-chosen).sigmoid() + rejected.sigmoid()


def _apo_down(scores: PairScores, settings: PreferenceSection) -> Tensor:
    """D'Oosterlinck et al. 2024, for answers that are worse than the model's."""
    chosen, rejected = (settings.beta * ratio for ratio in scores.ratios)
    return chosen.sigmoid() + (rejected - chosen).sigmoid()


def _discopop(scores: PairScores, settings: PreferenceSection) -> Tensor:
    """Lu et al. 2024."""
    chosen, rejected = scores.ratios
    logits = settings.beta * (chosen - rejected)
    share = (logits / settings.discopop_tau).sigmoid()
    return -F.logsigmoid(logits) * (1.0 - share) + torch.exp(-logits) * share


def _cpo(scores: PairScores, settings: PreferenceSection) -> Tensor:
    """Xu et al. 2024: DPO's loss without a reference, and the loss of the chosen answer."""
    logits = settings.beta * (scores.chosen - scores.rejected)
    return _smoothed(logits, settings.label_smoothing) + _sft(scores, settings)


def _simpo(scores: PairScores, settings: PreferenceSection) -> Tensor:
    """Meng et al. 2024."""
    chosen, rejected = scores.means
    return _smoothed(settings.beta * (chosen - rejected) - settings.gamma, settings.label_smoothing)


def _orpo(scores: PairScores, settings: PreferenceSection) -> Tensor:
    """Hong et al. 2024: the loss of the chosen answer, and beta times that of the ratio of odds."""
    chosen, rejected = scores.means
    odds = (chosen - rejected) - (torch.log(-torch.expm1(chosen)) - torch.log(-torch.expm1(rejected)))
    return _sft(scores, settings) - settings.beta * F.logsigmoid(odds)


def _sft(scores: PairScores, _: PreferenceSection) -> Tensor:
    """Pang et al. 2024 (RPO's second term): -log p(c) / n(c)."""
    return -scores.means[0]


LOSSES: dict[str, Callable[[PairScores, PreferenceSection], Tensor]] = {
    loss.__name__.removeprefix("_"): loss
    for loss in (
        _dpo, _hinge, _ipo, _robust, _exo_pair, _nca_pair, _bco_pair, _sppo_hard, _apo_zero, _apo_down, _discopop,
        _cpo, _simpo, _orpo, _sft,
    )
}  # fmt: skip
