"""Training objectives for image models (prediction of noise or velocity at random timesteps) and their loss.

epsilon         noisy = sqrt(a) x + sqrt(1 - a) e, target e                         SD 1.5, SDXL (Ho et al., 2020)
v_prediction    target sqrt(a) e - sqrt(1 - a) x                                    (Salimans and Ho, 2022)
flow matching   noisy = (1 - s) x + s e, target e - x                               SD3.5, Flux (Esser et al., 2024)

x: latents, e: noise, a and s: the scheduler's values at the drawn timestep.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.config import ImageSection
from trainer.patches.loss_head import to_device
from trainer.tasks.images.batches import SIZES, ImageBatch, SizeGroup
from trainer.tasks.images.pipeline import Pipeline
from trainer.tasks.task import StepLoss


@dataclass(frozen=True)
class NoisyBatch:
    noisy: Tensor
    target: Tensor
    timesteps: Tensor
    """Timesteps [B] in the model's units."""
    weights: Tensor
    """Weights [B] of the squared errors."""


class Objective:
    """A run's training objective: how timesteps are drawn and noise is added."""

    def __init__(self, pipeline: Pipeline, image: ImageSection) -> None:
        self._scheduler: Any = pipeline.build_training_scheduler(image)
        self._flow, self._image = pipeline.family.is_flow_matching, image
        self._count = int(self._scheduler.config.num_train_timesteps)
        normal = image.times == "logit_normal" or (image.times == "auto" and self._flow)
        self._normal = (image.logit_mean, image.logit_std) if normal else None

    def draw_timestep(self, generator: torch.Generator) -> float:
        if self._normal is None:
            return float(torch.rand((), generator=generator, dtype=torch.float64))
        mean, std = self._normal
        return float(torch.sigmoid(mean + std * torch.randn((), generator=generator, dtype=torch.float64)))

    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> NoisyBatch:
        """Add noise [B, C, H, W] to latents at timesteps [B] in [0, 1]."""
        index = (timesteps.double() * self._count).long().clamp(max=self._count - 1)
        add = self._add_flow_noise if self._flow else self._add_diffusion_noise
        return add(latents, noise, index)

    def _add_diffusion_noise(self, latents: Tensor, noise: Tensor, index: Tensor) -> NoisyBatch:
        from diffusers.training_utils import compute_snr

        scheduler = self._scheduler
        noisy = scheduler.add_noise(latents, noise, index)
        predicts_velocity = scheduler.config.prediction_type == "v_prediction"
        target = scheduler.get_velocity(latents, noise, index) if predicts_velocity else noise
        weights = torch.ones_like(index, dtype=torch.float32)
        if (gamma := self._image.min_snr_gamma) is not None:
            ratio = compute_snr(scheduler, index)
            # For epsilon, min(SNR, gamma) / SNR, which is 1 at a final timestep without signal.
            weights = ratio.clamp(max=gamma) / (ratio + 1) if predicts_velocity else (gamma / ratio).clamp(max=1.0)
        return NoisyBatch(noisy, target, index, weights)

    def _add_flow_noise(self, latents: Tensor, noise: Tensor, index: Tensor) -> NoisyBatch:
        # The scheduler's first timestep is the noisiest; here, time grows with the noise.
        at = self._count - 1 - index
        sigmas = self._scheduler.sigmas.to(latents.device)[at]
        timesteps = self._scheduler.timesteps.to(latents.device)[at]
        level = sigmas.view(-1, 1, 1, 1)
        noisy = (1.0 - level) * latents + level * noise
        return NoisyBatch(noisy, noise - latents, timesteps, torch.ones_like(sigmas, dtype=torch.float32))


class NoiseLoss(StepLoss):
    """Computes sum_b w_b mean((prediction_b - target_b)^2) in fp32; w includes min-SNR weights in training only."""

    load_balancing_loss = 0.0

    def __init__(self, objective: Objective, dtype: torch.dtype, guidance: float) -> None:
        self._objective, self._dtype, self._guidance = objective, dtype, guidance

    def __call__(self, model: Any, batch: ImageBatch, device: torch.device) -> Tensor:
        return torch.stack([self._compute_group_loss(model, group, device) for group in batch.groups]).sum()

    def _compute_group_loss(self, model: Any, group: SizeGroup, device: torch.device) -> Tensor:
        tensors = (group.latents, group.noise, group.timesteps)
        noised = self._objective.add_noise(*(to_device(tensor, device) for tensor in tensors))
        conditions = {name: to_device(value, device) for name, value in group.conditions.items()}
        conditions = {name: value if name == SIZES else value.to(self._dtype) for name, value in conditions.items()}
        conditions["guidance"] = torch.full_like(noised.timesteps, self._guidance, dtype=torch.float32)
        predicted = model(noised.noisy.to(self._dtype), noised.timesteps, conditions)
        errors = (predicted.float() - noised.target).square().flatten(1).mean(1)
        if torch.is_grad_enabled():  # held-out losses are unweighted, so that they can be compared between runs
            errors = errors * noised.weights
        return (errors * to_device(group.weights, device)).sum()
