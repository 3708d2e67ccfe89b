"""The bytes of a model's weights on one rank: as they are stored, partitioned, and gathered again under stage 3."""

from dataclasses import dataclass

from ops.fake_quantised import ELEMENTS_AT_ONCE
from trainer.memory.widths import Shapes, Weight

ALLOCATION = 512
"""Bytes to which torch's allocator rounds every tensor."""
ROUNDED_AT_ONCE = 16
"""Bytes for each of the weights that are rounded at a time (training.qat): four copies in 32 bits."""
GATHERED_LAYERS = 2
"""Layers whose weights are whole at once under stage 3: the one that computes and the one that is fetched."""


@dataclass(frozen=True)
class Placement:
    """How parameters, gradients and optimizer state are kept: stage, ranks, offload, formats."""

    stage: int
    world_size: int
    offload_optimizer: bool
    offload_parameters: bool
    by_layer: bool
    """Stage 3 gathers whole layers; the adapter stays on every rank."""
    flat: bool
    """One buffer for all LoRA factors."""
    element: int
    master: bool
    """16-bit training, with 32-bit master weights."""
    eight_bit_moments: bool
    packed: bool
    eight_bit: bool
    """What is packed has 8 bits a value and a scale a row, not 4 bits and a scale a block."""
    block_size: int
    double_quant: bool
    accumulation: int
    reduce_bucket: int
    """Elements; trainer/parallel/engine/deepspeed_engine.py makes it no larger than what is trained."""
    overlap: bool
    on_gpu: bool
    prefetch: int
    live: int
    rounded: bool = False
    """Adapted layers make their merged weight anew in every pass (training.qat)."""
    base_states: int = 0
    """Bytes on the host of what the base says of reference text."""


def rounded(size: int) -> int:
    """Up to what the allocator hands out."""
    return -(-size // ALLOCATION) * ALLOCATION


def bytes_of(weight: Weight, placement: Placement) -> int:
    """A weight as it lies on the card: elements x e, or a byte or half a byte each with their scales."""
    if not is_packed(weight, placement):
        return rounded(weight.elements * placement.element)
    if weight.fp8_scales or (placement.eight_bit and not weight.mxfp4):
        return rounded(weight.elements) + scales_of(weight, placement)
    return rounded((weight.elements + 1) // 2) + scales_of(weight, placement)


def is_packed(weight: Weight, placement: Placement) -> bool:
    """Whether a weight has 4 or 8 bits for a value: a packed base's matrices, and what is stored so."""
    return weight.mxfp4 or weight.fp8_scales > 0 or (placement.packed and weight.packable)


def scales_of(weight: Weight, placement: Placement) -> int:
    """What a quantised weight needs in addition to its numbers.

    8 bits: 4 bytes a row, or for each scale that is stored.

    Scales: 4 bytes per block, or 1 byte per block and 4 bytes per 256 blocks (double quantisation); code books 16 and
    256 numbers of 32 bits per matrix. Of experts each has its own blocks, and all have the same books. MXFP4: 1 byte
    per 32 values.
    """
    if not is_packed(weight, placement):
        return 0
    if weight.mxfp4:
        return rounded(weight.elements // 32)
    if weight.fp8_scales:
        return rounded(4 * weight.fp8_scales)
    if placement.eight_bit:
        return rounded(4 * weight.rows)
    matrices = max(1, weight.experts)
    blocks = -(-weight.elements // matrices // placement.block_size)
    if not placement.double_quant:
        return rounded(64) + rounded(4 * blocks * matrices)
    nested = 4 * -(-blocks // 256) * matrices
    return rounded(64) + rounded(blocks * matrices) + rounded(nested) + rounded(1024) + rounded(4 * matrices)


def dequantised_experts(shapes: Shapes, placement: Placement) -> int:
    """The buffers into which packed experts are dequantised: one for each of a layer's tensors, for all layers."""
    layers: dict[int, list[int]] = {}
    for weight in shapes.weights:
        if weight.experts and is_packed(weight, placement):
            layers.setdefault(weight.layer, []).append(rounded(weight.elements * placement.element))
    return max(map(sum, layers.values()), default=0)


def rounded_weight(shapes: Shapes, placement: Placement) -> int:
    """One layer's Q(W + s B A), which is there for a product and goes, and what its rounding takes beside it."""
    if not placement.rounded:
        return 0
    largest = max((each.elements for each in shapes.weights if each.packable and not each.experts), default=0)
    return rounded(largest * placement.element) + ROUNDED_AT_ONCE * min(largest, ELEMENTS_AT_ONCE)


def base_weights(shapes: Shapes, placement: Placement) -> int:
    """The frozen weights with their scales: whole, or this rank's share under stage 3, or none where offloaded."""
    return held(sum(bytes_of(weight, placement) for weight in shapes.weights if not weight.trained), placement)


def quantisation_state(shapes: Shapes, placement: Placement) -> int:
    """The scales among `base_weights`."""
    return held(sum(scales_of(weight, placement) for weight in shapes.weights if not weight.trained), placement)


def held(size: int, placement: Placement) -> int:
    """What a rank's GPU holds of parameters that stage 3 partitions or offloads."""
    return 0 if placement.stage == 3 and placement.offload_parameters else share(size, placement, 3)


def gathered(shapes: Shapes, placement: Placement) -> tuple[int, int]:
    """Whole weights that stage 3 holds at once: those of layers, and of what lies outside of them.

    By layer: the largest frozen layer twice; embedding or head while it is used. By module: the same, trained or not,
    and what DeepSpeed fetches ahead, up to `max_live_parameters`. A rank that is alone copies nothing, unless from host
    memory.
    """
    alone = placement.world_size == 1 and not placement.offload_parameters
    if placement.stage < 3 or alone:
        return 0, 0
    fetched = fetched_weights(shapes, placement)
    layers = [
        sum(bytes_of(weight, placement) for weight in fetched if weight.layer == index)
        for index in range(len(shapes.layers))
    ]
    of_layers = GATHERED_LAYERS * max(layers, default=0)
    outside = max((bytes_of(weight, placement) for weight in fetched if weight.layer < 0), default=0)
    if placement.by_layer:
        return of_layers, outside
    ahead = of_layers + placement.prefetch * placement.element
    return min(sum(layers), ahead, placement.live * placement.element), outside


def fetched_weights(shapes: Shapes, placement: Placement) -> list[Weight]:
    """What stage 3 fetches for a layer: its frozen weights and, by module, trained ones other than LoRA's factors."""
    return [weight for weight in shapes.weights if not (weight.trained if placement.by_layer else weight.factor)]


def share(size: int, placement: Placement, from_stage: int) -> int:
    """A rank's part of what is partitioned from `from_stage` on."""
    return -(-size // placement.world_size) if placement.stage >= from_stage else size
