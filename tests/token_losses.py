"""The losses of `training.loss` as their authors publish them, from logits [K, V] and targets [K]: a loss each."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EAFT_ALPHA, FOCAL_GAMMA, LABEL_SMOOTHING = 0.7, 1.5, 0.2


def nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -ln p."""
    return F.cross_entropy(logits, targets, reduction="none")


def dft(logits: Tensor, targets: Tensor) -> Tensor:
    """TRL 1.16.0, SFTTrainer: the loss of each token times its probability, detached."""
    log_p = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    return -log_p * log_p.exp().detach()


def eaft(logits: Tensor, targets: Tensor) -> Tensor:
    """LLaMA-Factory 0.9.5: the entropy of the 20 largest logits over 3.0, detached, to the power of eaft_alpha."""
    largest = torch.topk(logits.detach(), k=20, dim=-1).values
    log_p = largest - largest.logsumexp(-1, keepdim=True)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return nll(logits, targets) * (entropy / 3.0) ** EAFT_ALPHA


def focal(logits: Tensor, targets: Tensor) -> Tensor:
    """Lin et al. (2017), equation 4."""
    p = logits.softmax(-1).gather(-1, targets[:, None])[:, 0]
    return -((1 - p) ** FOCAL_GAMMA) * p.log()


def label_smoothing(logits: Tensor, targets: Tensor) -> Tensor:
    """torch's cross-entropy."""
    return F.cross_entropy(logits, targets, reduction="none", label_smoothing=LABEL_SMOOTHING)


PUBLISHED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nll": nll,
    "dft": dft,
    "eaft": eaft,
    "focal": focal,
    "label_smoothing": label_smoothing,
}
PARAMETERS = {"nll": 0.0, "dft": 0.0, "eaft": EAFT_ALPHA, "focal": FOCAL_GAMMA, "label_smoothing": LABEL_SMOOTHING}
SETTINGS: dict[str, dict[str, Any]] = {
    "nll": {},
    "dft": {"training__loss": "dft"},
    "eaft": {"training__loss": "eaft", "training__eaft_alpha": EAFT_ALPHA},
    "focal": {"training__loss": "focal", "training__focal_gamma": FOCAL_GAMMA},
    "label_smoothing": {"training__loss": "label_smoothing", "training__label_smoothing": LABEL_SMOOTHING},
}
