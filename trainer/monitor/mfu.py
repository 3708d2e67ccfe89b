"""Compute the model FLOPs utilization (MFU): a step's FLOPs per second divided by the GPU's peak.

    F = T (4 P + 6 Q) + K (4 or 6) H + 6 (sum of L^2 D over attention layers and documents)

T: tokens. P, Q: frozen and trained weights in the linear layers; per token, each needs 2 FLOPs forward, 2
for the input gradient and, if trained, 2 for the weight gradient. K: tokens that contribute to the loss. H:
weights in the output head (4 FLOPs each if frozen, 6 if trained). L: tokens in a document. D: heads x head
size; causal attention needs 2 L^2 D FLOPs forward, half of the full square, and twice as many backward.

Not counted: recomputation, norms, activation functions, the scan in state-space layers, the optimizer, and
experts to which a token is not routed.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config.yaml_core import read_yaml
from trainer.data.batches import MicroBatch
from trainer.model.expert_layers import (
    DOWN,
    ExpertFactor,
    count_experts_per_token,
    get_expert_shape,
    has_fused_experts,
    list_expert_tensors,
    takes_all_tokens,
)
from trainer.monitor.hooks import FinishedStep, Hook
from trainer.parallel.engine.linear_layers import find_base_model
from trainer.parallel.engine.partitioned import get_full_size

TERA = 1e12
PEAK_TFLOPS: dict[str, float] = read_yaml(Path(__file__).with_name("peaks.yaml")).tree
"""Dense TFLOP/s by GPU name."""


def find_peak_flops(gpu_name: str, precision: str) -> float | None:
    """Return the dense 16-bit FLOP/s of a GPU by name; None for an unknown GPU or 32-bit precision."""
    if precision not in ("bf16", "fp16"):
        return None
    return next((tflops * TERA for name, tflops in PEAK_TFLOPS.items() if name in gpu_name), None)


class StepFlops:
    """Counts the FLOPs for this rank's micro-batches. Inspects the model, which may be partitioned, only once."""

    def __init__(self, model: nn.Module) -> None:
        inner = find_base_model(model)
        head = inner.get_output_embeddings()
        config = inner.config.get_text_config()
        self.per_token = self.per_target = 0.0
        self.attention: dict[int | None, int] = {}
        """Sum of heads x head size over the layers, by sliding window size (or None)."""
        for name, module in inner.named_modules():
            if is_attention(module):
                window = getattr(module, "sliding_window", getattr(config, "sliding_window", None)) or None
                width = int(getattr(config, "num_attention_heads", 0) * module.head_dim)
                self.attention[window] = self.attention.get(window, 0) + width
            flops = _count_linear_flops(name, module, config)
            if module is head:
                self.per_target += flops
            else:
                self.per_token += flops

    def count(self, batches: Sequence[MicroBatch]) -> float:
        total = 0.0
        for batch in batches:
            # Position of each token in its document; a token attends to all earlier positions and to itself.
            if batch.attention_mask is not None:
                positions, weights = batch.attention_mask.cumsum(1) - 1, batch.attention_mask
            else:
                assert batch.position_ids is not None  # packed sequences have position ids
                positions, weights = batch.position_ids, torch.ones_like(batch.position_ids)
            total += self.per_token * int(weights.sum())
            total += self.per_target * batch.target_count
            heads = 1.0
            # If several ranks share a sequence, this rank computes some heads for the full sequence.
            if batch.sequence is not None and batch.cu_seqlens is not None:
                positions = torch.cat([torch.arange(length) for length in batch.cu_seqlens.diff().tolist()])
                weights, heads = torch.ones_like(positions), 1.0 / batch.sequence.size
            for window, width in self.attention.items():
                max_positions = positions if window is None else positions.clamp(max=window - 1)
                total += 6.0 * width * heads * int(((2 * max_positions + 1) * weights).sum())
        return total


def _count_linear_flops(name: str, module: nn.Module, config: Any) -> float:
    if isinstance(module, nn.Linear):
        size = float(module.in_features * module.out_features)
    elif has_fused_experts(module):
        experts = get_expert_shape(module, DOWN)[0]
        visited = experts if takes_all_tokens(module) else count_experts_per_token(config)
        elements = sum(math.prod(get_expert_shape(module, name)) for name in list_expert_tensors(module))
        size = elements * visited / experts
    elif isinstance(module, ExpertFactor):
        size = get_full_size(module.weight) * count_experts_per_token(config) / module.experts
    else:
        return 0.0
    # The factors of a flat adapter are views without requires_grad.
    trained = "lora_" in name or any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    return (6.0 if trained else 4.0) * size


def is_attention(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Attention") and hasattr(module, "head_dim")


class MfuMeter(Hook):
    """Measures `perf/mfu` on this rank. Stores FLOPs by step, because counting can be one step ahead."""

    def __init__(self, flops: StepFlops, peak: float) -> None:
        self._flops = flops
        self._peak = peak
        self._flops_by_step: dict[int, float] = {}

    @classmethod
    def for_device(cls, model: nn.Module, device: torch.device, precision: str) -> "MfuMeter | None":
        peak = find_peak_flops(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None
        return cls(StepFlops(model), peak) if peak else None

    def on_batches(self, step: int, batches: Sequence[MicroBatch]) -> None:
        self._flops_by_step[step] = self._flops.count(batches)

    def after_step(self, step: FinishedStep) -> dict[str, float]:
        return {"perf/mfu": self._flops_by_step.pop(step.number, 0.0) / step.seconds / self._peak}
