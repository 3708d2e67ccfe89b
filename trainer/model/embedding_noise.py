"""Noise on input embeddings in training (NEFTune)."""

from typing import Any

import torch


def add_embedding_noise(model: Any, alpha: float) -> None:
    """Add uniform noise in +-alpha / sqrt(L D) to the embeddings [B, L, D] of every training pass (arXiv:2310.05914).

    It is drawn from torch's generator. Checkpoints hold its state and repeated steps restore it, so that a step has the
    same noise again. Passes without gradients have none.
    """

    def add_noise(module: Any, inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
        if not (module.training and torch.is_grad_enabled()):
            return embedded
        bound = alpha / (embedded.shape[1] * embedded.shape[2]) ** 0.5
        return embedded + torch.empty_like(embedded).uniform_(-bound, bound)

    if alpha:
        model.get_input_embeddings().register_forward_hook(add_noise)
