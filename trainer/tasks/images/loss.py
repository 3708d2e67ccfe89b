"""The loss of image models."""

from typing import Any

import torch
from torch import Tensor

from trainer.patches.loss_head import to_device
from trainer.tasks.images.batches import SIZES, Group, ImageBatch
from trainer.tasks.images.objective import Objective


class NoiseLoss:
    """sum_b w_b mean((prediction_b - target_b)^2), fp32; min-SNR weights w in training only."""

    def __init__(self, objective: Objective, dtype: torch.dtype, guidance: float) -> None:
        """`dtype` is the compute dtype of the model; `guidance` is passed to models that take it."""
        self._objective, self._dtype, self._guidance = objective, dtype, guidance
        self.balancing: Tensor | float = 0.0

    def __call__(self, model: Any, batch: ImageBatch, device: torch.device) -> Tensor:
        losses = [self._of_group(model, group, device) for group in batch.groups]
        return torch.stack(losses).sum()

    def _of_group(self, model: Any, group: Group, device: torch.device) -> Tensor:
        latents, noise, times = (to_device(each, device) for each in (group.latents, group.noise, group.times))
        noised = self._objective.noised(latents, noise, times)
        conditions = {name: to_device(value, device) for name, value in group.conditions.items()}
        conditions = {name: value if name == SIZES else value.to(self._dtype) for name, value in conditions.items()}
        conditions["guidance"] = torch.full_like(noised.times, self._guidance, dtype=torch.float32)
        predicted = model(noised.noisy.to(self._dtype), noised.times, conditions, group.captions)
        errors = (predicted.float() - noised.target).square().flatten(1).mean(1)
        if torch.is_grad_enabled():  # held-out losses are not weighted, so that runs can be compared
            errors = errors * noised.weights
        return (errors * to_device(group.weights, device)).sum()
