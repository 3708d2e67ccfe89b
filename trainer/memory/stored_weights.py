"""Describe a model's tensors and layers, and compute the bytes of its stored, sharded and gathered weights."""

from dataclasses import dataclass, field
from typing import Any, Literal

from ops.fake_quantize import ELEMENTS_AT_ONCE
from trainer.config import QuantizationSection, TrainingSection, ZeroSection
from trainer.patches.model_properties import ModelProperties

ALLOCATION_GRANULARITY = 512
"""Granularity in bytes of torch's allocator."""
BYTES_PER_ROUNDED_WEIGHT = 16
"""Bytes per weight while a matrix is rounded (training.qat): four fp32 copies."""
GATHERED_LAYERS = 2
"""Number of layers gathered at the same time at stage 3: the current layer and the prefetched one."""


@dataclass(frozen=True)
class Weight:
    elements: int
    packable: bool
    """Whether the weight is a matrix that is packed if the base model is quantized."""
    trained: bool
    layer: int
    """Index of the weight's decoder layer; -1 outside of layers."""
    factor: bool = False
    """Whether the weight is a LoRA factor."""
    experts: int = 0
    """Number of experts in the tensor, which are packed separately; 0 for other weights."""
    mxfp4: bool = False
    """Whether the weight stays in MXFP4, as stored."""
    rows: int = 0
    """Rows of the matrix, or of all experts' matrices."""
    stored_bits: int = 0
    """Bits per element if the weight stays in the FP8 or 4-bit format of the checkpoint; otherwise 0."""
    stored_scales: int = 0
    """Bytes of the scales stored in the checkpoint."""


@dataclass(frozen=True)
class ModelShapes:
    hidden: int
    vocabulary: int
    weights: tuple[Weight, ...]
    layers: tuple[int, ...]
    """Kind of each layer; layers of the same kind keep the same activations."""
    properties: ModelProperties
    model: Any = field(repr=False, compare=False)
    """The model with its adapter on the meta device; only the first layer of each kind has contents."""
    stored: Literal["", "rows", "blocks", "groups"] = ""
    """Unit that shares a scale if the checkpoint stores linear layers in FP8 or a 4-bit format."""
    buffers: int = 0
    """Bytes of buffers, which keep their dtype (SD3.5 Medium has a position table of 864 MiB)."""

    @property
    def trained_numel(self) -> int:
        return sum(weight.elements for weight in self.weights if weight.trained)


@dataclass(frozen=True)
class Placement:
    """Describes how parameters, gradients and optimizer state are stored: settings, ranks and formats."""

    zero: ZeroSection
    training: TrainingSection
    quantization: QuantizationSection
    packed: bool
    """Whether this run quantizes the base model."""
    world_size: int
    by_layer: bool
    """Whether stage 3 gathers whole layers and replicates the adapter."""
    flat: bool
    """Whether all LoRA factors are in one buffer."""
    element_size: int
    shard_group: int = 0
    """Ranks that share one copy of the base model at stage 3; 0: all."""
    base_states: int = 0
    """Bytes of host memory for the base model's outputs on reference text."""

    @property
    def has_master_weights(self) -> bool:
        return self.element_size < 4


def round_up(size: int) -> int:
    """Round `size` up to a multiple of 512 bytes, the granularity of torch's allocator."""
    return -(-size // ALLOCATION_GRANULARITY) * ALLOCATION_GRANULARITY


def stored_bytes(weight: Weight, placement: Placement) -> int:
    """Return the bytes of a stored weight. Quantized elements need 1 or 1/2 byte each, plus scales."""
    if not is_packed(weight, placement):
        return round_up(weight.elements * placement.element_size)
    if (weight.stored_bits or (8 if placement.quantization.is_8bit and not weight.mxfp4 else 4)) == 8:
        return round_up(weight.elements) + scale_bytes(weight, placement)
    return round_up((weight.elements + 1) // 2) + scale_bytes(weight, placement)


def is_packed(weight: Weight, placement: Placement) -> bool:
    """Return whether a weight is quantized to 4 or 8 bits, by this run or in its checkpoint."""
    return weight.mxfp4 or weight.stored_bits > 0 or (placement.packed and weight.packable)


def scale_bytes(weight: Weight, placement: Placement) -> int:
    """Return the bytes of a weight's quantization scales; 0 for an unquantized weight.

    8 bits: 4 bytes per row. 4 bits: 4 bytes per block, plus an fp32 codebook of 16 values. With double
    quantization: 1 byte per block, 4 bytes per 256 blocks, an fp32 offset, and a second codebook of 256 values.
    MXFP4: 1 byte per 32 values. Weights stored in FP8 or 4 bits: the value of `stored_scales`. Experts have
    separate blocks but share the codebooks.
    """
    if not is_packed(weight, placement):
        return 0
    if weight.mxfp4:
        return round_up(weight.elements // 32)
    if weight.stored_bits:
        return round_up(weight.stored_scales)
    if placement.quantization.is_8bit:
        return round_up(4 * weight.rows)
    matrices = max(1, weight.experts)
    blocks = -(-weight.elements // matrices // placement.quantization.block_size)
    if not placement.quantization.double_quant:
        return round_up(64) + round_up(4 * blocks * matrices)
    nested = 4 * -(-blocks // 256) * matrices
    return round_up(64) + round_up(blocks * matrices) + round_up(nested) + round_up(1024) + round_up(4 * matrices)


def dequantized_expert_bytes(shapes: ModelShapes, placement: Placement) -> int:
    """Return the bytes of buffers for dequantized experts: one per expert tensor in a layer, shared by all layers."""
    layers: dict[int, list[int]] = {}
    for weight in shapes.weights:
        if weight.experts and is_packed(weight, placement):
            layers.setdefault(weight.layer, []).append(round_up(weight.elements * placement.element_size))
    return max(map(sum, layers.values()), default=0)


def fake_quantization_bytes(shapes: ModelShapes, placement: Placement) -> int:
    """Return the bytes for a temporary merged weight Q(W + s B A) and the buffers for quantizing it."""
    if not placement.training.qat:
        return 0
    largest = max((weight.elements for weight in shapes.weights if weight.packable and not weight.experts), default=0)
    return round_up(largest * placement.element_size) + BYTES_PER_ROUNDED_WEIGHT * min(largest, ELEMENTS_AT_ONCE)


def base_weight_bytes(shapes: ModelShapes, placement: Placement) -> int:
    frozen = (weight for weight in shapes.weights if not weight.trained)
    return resident_bytes(sum(stored_bytes(weight, placement) for weight in frozen), placement)


def resident_bytes(size: int, placement: Placement) -> int:
    """Return how many of `size` bytes stay on a rank's GPU: all, a shard at stage 3, or 0 if offloaded."""
    return 0 if placement.zero.stage == 3 and placement.zero.offload_parameters else base_shard_size(size, placement)


def gathered_bytes(shapes: ModelShapes, placement: Placement) -> tuple[int, int]:
    """Return the peak bytes of gathered weights at stage 3, as (in decoder layers, outside of them).

    Per-layer gathering holds two decoder layers at a time: the current one and the prefetched one. Gathering by module
    also prefetches up to `prefetch_bucket_size` elements, and never holds more than `max_live_parameters`. Outside of
    layers, one weight (embedding or head) is gathered while it is used. A single rank gathers only offloaded weights.
    """
    is_single = (placement.shard_group or placement.world_size) == 1 and not placement.zero.offload_parameters
    if placement.zero.stage < 3 or is_single:
        return 0, 0
    fetched = list_gathered_weights(shapes, placement)
    layers = [
        sum(stored_bytes(weight, placement) for weight in fetched if weight.layer == index)
        for index in range(len(shapes.layers))
    ]
    inside = GATHERED_LAYERS * max(layers, default=0)
    outside = max((stored_bytes(weight, placement) for weight in fetched if weight.layer < 0), default=0)
    if placement.by_layer:
        return inside, outside
    prefetched = inside + placement.zero.prefetch_bucket_size * placement.element_size
    return min(sum(layers), prefetched, placement.zero.max_live_parameters * placement.element_size), outside


def list_gathered_weights(shapes: ModelShapes, placement: Placement) -> list[Weight]:
    """Return what stage 3 gathers: frozen weights if per layer, or all but LoRA factors if per module."""
    return [weight for weight in shapes.weights if not (weight.trained if placement.by_layer else weight.factor)]


def base_shard_size(size: int, placement: Placement) -> int:
    return -(-size // (placement.shard_group or placement.world_size)) if placement.zero.stage == 3 else size


def shard_size(size: int, placement: Placement, from_stage: int) -> int:
    """Return the bytes per rank of a tensor of `size` bytes that is partitioned at stage `from_stage` or higher."""
    return -(-size // placement.world_size) if placement.zero.stage >= from_stage else size
