"""Estimate the memory that a micro-batch needs for activations and the loss.

Activations are extrapolated from one observed layer of each kind.

Legend: T tokens in a micro-batch, H hidden width, e bytes per value, V vocabulary size, K positions with a target.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ops.head import MAX_LOGITS_PER_CHUNK
from trainer.config import TrainingSection
from trainer.memory.observed import Layer, LayerSettings
from trainer.memory.stored_weights import ModelShapes
from trainer.model.targets import find_non_text_modules
from trainer.parallel.engine.linear_layers import find_base_model

FP32_BYTES = 4
UNFUSED_LOSS_BYTES = 12
"""Bytes per logit at the peak: log-probabilities, their gradient and the logits' gradient, all in fp32."""


@dataclass(frozen=True)
class MicroStep:
    """Sizes and kernels of one micro-step on one rank."""

    rows: int
    targets: int
    """Positions per row for which logits are computed."""
    settings: LayerSettings
    own_norms: bool
    fused_loss: bool
    training: TrainingSection
    reference_rows: int = 0
    """Rows of reference text; the activations of their separate forward pass are kept until the backward pass."""
    host_memory: int | None = None
    """Bytes of host memory for offloaded activations; None: unlimited."""

    @property
    def larger_pass_rows(self) -> int:
        """Rows in the larger of the two backward passes: one for training rows, one for reference rows."""
        return max(self.rows - self.reference_rows, self.reference_rows)

    @property
    def tokens(self) -> int:
        return self.rows * self.settings.length

    @property
    def element_size(self) -> int:
        """Bytes per activation value (e)."""
        return self.settings.dtype.itemsize


@dataclass(frozen=True)
class Activations:
    kept: int
    """Bytes kept from the forward pass for the backward pass."""
    backward: int
    """Additional bytes needed during the backward pass, including those of a recomputed layer."""
    on_host: int = 0
    """Bytes kept in host memory."""


def estimate_tower_activations(model: Any, image_tokens: int, micro_step: MicroStep) -> tuple[int, int]:
    """Return the activation bytes of one vision tower layer, and the bytes that training keeps for the whole tower.

    A layer keeps the inputs and outputs of its linear layers, or only its input with gradient checkpointing.
    """
    base = find_base_model(model)
    modules = [module for path in find_non_text_modules(base) for module in base.get_submodule(path).modules()]
    lists = [module for module in modules if isinstance(module, nn.ModuleList)]
    if not (image_tokens and lists):
        return 0, 0
    layers = max(lists, key=len)
    linear = [module for module in layers[0].modules() if isinstance(module, nn.Linear) and module.in_features > 1]
    config = base.config.vision_config
    merge_size = getattr(config, "spatial_merge_size", None) or getattr(config, "pooling_kernel_size", None) or 1
    if tokens := getattr(base.config, "mm_tokens_per_image", None):
        merge_size = config.image_size // config.patch_size // tokens**0.5
    patches = int(image_tokens * merge_size**2) * micro_step.element_size
    layer = patches * sum(module.in_features + module.out_features for module in linear)
    recomputed = micro_step.training.gradient_checkpointing == "non_reentrant"
    return layer, len(layers) * (patches * linear[0].in_features if recomputed else layer)


def combine_layers(
    layers: Sequence[Layer], unrecomputed: Sequence[Layer], larger_pass_fraction: float, micro_step: MicroStep
) -> Activations:
    """Return the activation memory of all layers; `unrecomputed` lists the same layers without recomputation.

    Both lists are in model order. `larger_pass_fraction` is the fraction of the rows in the larger of the two backward
    passes (see `MicroStep.larger_pass_rows`). The recomputed layers come first in the model, so the activations of all
    other layers have been freed when one is recomputed.
    """
    training = micro_step.training
    if not training.recompute_attention:
        layers, unrecomputed = (
            [replace(each, output_bytes=each.output_bytes + each.attention) for each in kinds]
            for kinds in (layers, unrecomputed)
        )
    selective = training.gradient_checkpointing == "selective"
    checkpointed = training.gradient_checkpointing_layers or len(layers)
    count = 0 if selective or training.gradient_checkpointing == "none" else checkpointed
    inputs = [layer.output_bytes for layer in layers[: len(layers) if selective else count]]
    on_host = _sum_fitting_inputs(inputs, micro_step.host_memory) if training.offload_activations else 0
    # One input is copied to or from the host while the next is computed or used.
    in_flight = min(2 * max(inputs, default=0), on_host)
    rest = sum(layer.kept for layer in layers[count:])
    kept = rest - on_host + in_flight + (0 if selective else sum(inputs))
    needs = [larger_pass_fraction * (layer.peak - layer.kept) for layer in layers[count:]]
    needs += [larger_pass_fraction * (layer.peak - layer.output_bytes) - rest for layer in unrecomputed[:count]]
    return Activations(kept, int(max(needs, default=0)), on_host)


def _sum_fitting_inputs(inputs: Sequence[int], capacity: int | None) -> int:
    """Return the total bytes of the layer inputs that fit in host memory; other inputs stay on the device."""
    total = 0
    for size in inputs:
        total += size if capacity is None or total + size <= capacity else 0
    return total


def loss_head_bytes(shapes: ModelShapes, micro_step: MicroStep) -> int:
    """Return the bytes of the final norm, the logits, the loss and the gradient of the hidden states.

    The fused loss needs the norm's output T H e, the K hidden states and their gradients 2 K H e, and one chunk of
    logits. The unfused loss needs 12 bytes per logit, plus e for the tanh output if logits are capped.
    """
    norm_element_size = micro_step.element_size if micro_step.own_norms else FP32_BYTES
    norm = micro_step.tokens * (shapes.hidden * norm_element_size + FP32_BYTES)
    hidden = micro_step.tokens * shapes.hidden * micro_step.element_size
    positions = micro_step.rows * min(micro_step.targets, micro_step.settings.length)
    if micro_step.fused_loss:
        chunk = min(positions * shapes.vocabulary, MAX_LOGITS_PER_CHUNK)
        return norm + hidden + (2 * positions * shapes.hidden + chunk) * micro_step.element_size
    per_logit = UNFUSED_LOSS_BYTES + (micro_step.element_size if shapes.properties.caps else 0)
    return norm + hidden + positions * (shapes.vocabulary * per_logit + 2 * shapes.hidden * micro_step.element_size)
