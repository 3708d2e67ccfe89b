"""The memory of one rank: what lies there all the time, what a micro-step adds, and which moment is the worst.

`peak` is what torch.cuda.max_memory_allocated() will say. What the driver reports is more: the CUDA context, NCCL's
buffers, and what torch's allocator holds without using it.
"""

from dataclasses import dataclass
from typing import Any

from ops.fake_quantised import ELEMENTS_AT_ONCE
from trainer.memory.activations import (
    FP32,
    Work,
    backward_of_layer,
    kept_by_layers,
    loss_head,
    recomputed_layer,
)
from trainer.memory.process import PROCESS, process_peak
from trainer.memory.widths import Shapes, Weight

GIB = 2**30
ALLOCATION = 512
"""Bytes to which torch's allocator rounds every tensor."""
CUBLAS_WORKSPACE = 2 * 32 * 2**20
"""cuBLAS works in 32 MiB on cards of compute capability 9.0, once for the thread of each direction."""
CONTEXT = 3 * GIB // 4
"""CUDA context, kernels and NCCL's buffers, which torch does not count."""
FRAGMENTATION = 0.04
"""Fraction of the peak that torch's allocator holds beyond it."""
ROUNDED_AT_ONCE = 16
"""Bytes for each of the weights that are rounded at a time (training.qat): four copies in 32 bits."""
EIGHT_BIT_FLOOR = 4096
"""bitsandbytes keeps the moments of smaller tensors in 32 bits."""
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
    """Elements; trainer/engine/deepspeed_engine.py makes it no larger than what is trained."""
    overlap: bool
    on_gpu: bool
    prefetch: int
    live: int
    rounded: bool = False
    """Adapted layers make their merged weight anew in every pass (training.qat)."""


@dataclass(frozen=True)
class Estimate:
    """Bytes by what they are for, at the worst moment; they add up to `peak`."""

    terms: dict[str, int]
    moment: str
    host: int
    disk: int
    process: int | None = None
    """Peak resident memory of a rank's process on a CPU."""

    @property
    def peak(self) -> int:
        """What torch.cuda.max_memory_allocated() will say."""
        return sum(self.terms.values())

    @property
    def needed(self) -> int:
        """What must be free: on a card the peak, the allocator's slack and the CUDA context; on a CPU the process."""
        return self.peak + self.slack + CONTEXT if self.process is None else self.process

    @property
    def slack(self) -> int:
        """What torch's allocator holds without using it."""
        return int(self.peak * FRAGMENTATION)


@dataclass(frozen=True)
class Seen:
    """Activations in bytes that were seen on an empty model, where they are not summed up from its layers."""

    kept: int
    """From the forward pass to the backward pass."""
    block: int
    """While the largest block is computed again."""
    backward: int
    """Gradients of activations at the worst place."""

    def times(self, rows: int) -> "Seen":
        """Of so many rows."""
        return Seen(self.kept * rows, self.block * rows, self.backward * rows)


def estimate(
    shapes: Shapes, work: Work, placement: Placement, *, checkpoints: int, seen: Seen | None = None
) -> Estimate:
    """The memory of one rank for one configuration. `checkpoints` is how many are kept on the disk."""
    resident = {
        "base model": base_weights(shapes, placement) - quantisation_state(shapes, placement),
        "quantisation state": quantisation_state(shapes, placement),
        "adapter" if any(weight.factor for weight in shapes.weights) else "trained weights": trained(shapes, placement),
        "gradients": waiting_gradients(shapes, placement),
        "optimizer": optimizer_state(shapes, placement),
        "workspaces": CUBLAS_WORKSPACE if placement.on_gpu else 0,
        "dequantised experts": dequantised_experts(shapes, placement),
        "rounded weight": rounded_weight(shapes, placement),
        "communication buffers": standing_buckets(placement),
    }
    if seen is None:
        kept, head = kept_by_layers(shapes, work), loss_head(shapes, work)
        block, of_layer = recomputed_layer(shapes, work), backward_of_layer(shapes, work)
    else:
        kept, head, block, of_layer = seen.kept, 0, seen.block, seen.backward
    layers, outside = gathered(shapes, placement)
    moments: dict[str, dict[str, int]] = {
        "loss": {
            "activations": kept,
            "logits and loss": head,
            "gathered weights": layers // GATHERED_LAYERS + outside,
        },
        "backward": {
            "activations": kept + block,
            "backward of a layer": of_layer,
            "gathered weights": layers if placement.by_layer else layers + outside,
        },
        "gradients": {"reduction": reduction(shapes, placement)},
        "step": {"optimizer step": optimizer_step(shapes, placement)},
    }
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    terms = {name: size for name, size in (resident | moments[moment]).items() if size}
    process = None
    if not placement.on_gpu:
        on_host = sum(resident.values()) + offloaded(shapes, work, placement)
        process = process_peak(shapes, work, on_host) if seen is None else PROCESS + on_host + kept + block + of_layer
    host = host_memory(shapes, work, placement)
    return Estimate(terms, moment, host, disk(shapes, placement, checkpoints), process)


def rounded(size: int) -> int:
    """Up to what the allocator hands out."""
    return -(-size // ALLOCATION) * ALLOCATION


def bytes_of(weight: Weight, placement: Placement) -> int:
    """A weight as it lies on the card: elements x e, or a byte or half a byte each with their scales."""
    if not is_packed(weight, placement):
        return rounded(weight.elements * placement.element)
    if placement.eight_bit and not weight.mxfp4:
        return rounded(weight.elements) + scales_of(weight, placement)
    return rounded((weight.elements + 1) // 2) + scales_of(weight, placement)


def is_packed(weight: Weight, placement: Placement) -> bool:
    """Whether a weight has 4 or 8 bits for a value: a packed base's matrices, and what is stored so."""
    return weight.mxfp4 or (placement.packed and weight.packable)


def scales_of(weight: Weight, placement: Placement) -> int:
    """What a quantised weight needs in addition to its numbers.

    8 bits: 4 bytes a row.

    Scales: 4 bytes per block, or 1 byte per block and 4 bytes per 256 blocks (double quantisation); code books 16 and
    256 numbers of 32 bits per matrix. Of experts each has its own blocks, and all have the same books. MXFP4: 1 byte
    per 32 values.
    """
    if not is_packed(weight, placement):
        return 0
    if weight.mxfp4:
        return rounded(weight.elements // 32)
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


def trained(shapes: Shapes, placement: Placement) -> int:
    """The trained weights in the type they compute in; as the base under stage 3 unless layers are gathered whole."""
    size = shapes.trained * placement.element
    return size if placement.by_layer else held(size, placement)


def waiting_gradients(shapes: Shapes, placement: Placement) -> int:
    """Gradients of earlier micro-steps, e each, partitioned from stage 2 on.

    DeepSpeed's own stage 3 keeps room for them always, on the host if the optimizer is there.
    """
    by_module = placement.stage == 3 and not placement.by_layer
    if placement.offload_optimizer if by_module else placement.accumulation == 1:
        return 0
    return share(shapes.trained * placement.element, placement, 2)


def bytes_per_moment(shapes: Shapes, placement: Placement) -> float:
    """Bytes per trained element for both moments of AdamW: 8, or 2 and the scales of 256 elements each."""
    if not placement.eight_bit_moments or shapes.trained < EIGHT_BIT_FLOOR:
        return 2.0 * FP32
    return 2.0 + 2.0 * FP32 / 256


def optimizer_state(shapes: Shapes, placement: Placement) -> int:
    """Master weights (4 bytes) and moments, partitioned from stage 1 on; 32-bit stage 0 trains the weights themselves.

    Offloaded they leave a buffer of one gradient on the card: that of the largest tensor.
    """
    if placement.offload_optimizer:
        return largest_trained(shapes, placement) * placement.element
    has_master = placement.master or placement.stage >= 1
    per_element = bytes_per_moment(shapes, placement) + (FP32 if has_master else 0)
    return share(int(shapes.trained * per_element), placement, 1)


def largest_trained(shapes: Shapes, placement: Placement) -> int:
    """Elements of the largest trained tensor: all LoRA factors where they are one buffer."""
    factors = [weight.elements for weight in shapes.weights if weight.trained and weight.factor]
    others = [weight.elements for weight in shapes.weights if weight.trained and not weight.factor]
    return max(sum(factors) if placement.flat else max(factors, default=0), *others, 0)


def bucket(placement: Placement) -> int:
    """DeepSpeed's buffers for a reduction: one, or two where communication overlaps."""
    return placement.reduce_bucket * placement.element * (2 if placement.overlap else 1)


def standing_buckets(placement: Placement) -> int:
    """DeepSpeed's own stage 3 allocates its bucket at the start; the others when the first gradient arrives."""
    return placement.reduce_bucket * placement.element if placement.stage == 3 and not placement.by_layer else 0


def reduction(shapes: Shapes, placement: Placement) -> int:
    """The end of a backward pass: gradients and buckets; the flat buffer's gradient is put together from its parts."""
    gradients = shapes.trained * placement.element * (3 if placement.flat else 1)
    buckets = bucket(placement) if 1 <= placement.stage <= 2 or placement.by_layer else 0
    return gradients + buckets


def optimizer_step(shapes: Shapes, placement: Placement) -> int:
    """Gradients in their own type and, in 16-bit training, in 32 bits for the update."""
    if placement.offload_optimizer:
        return shapes.trained * placement.element
    copies = share(shapes.trained * FP32, placement, 1) if placement.master else 0
    return shapes.trained * placement.element + 2 * copies


def host_memory(shapes: Shapes, work: Work, placement: Placement) -> int:
    """Host memory of a rank beside the process itself: what is offloaded, and the model while it is loaded whole."""
    streamed = placement.packed or placement.stage == 3
    read = [weight.elements for weight in shapes.weights if not weight.factor]
    loading = max(read, default=0) if streamed else sum(read)
    return max(offloaded(shapes, work, placement), loading * placement.element)


def offloaded(shapes: Shapes, work: Work, placement: Placement) -> int:
    """What lies on the host and not on the card."""
    total = 0
    if placement.offload_optimizer:
        # Master, two moments, their gradient, and the updated weights on their way back.
        total += share(shapes.trained * (4 * FP32 + 2 * placement.element), placement, 1)
    if placement.offload_parameters:
        total += share(sum(bytes_of(w, placement) for w in fetched_weights(shapes, placement)), placement, 3)
    if work.offload_activations and work.recompute != "none":
        total += sum(work.tokens * layer.hidden * work.element for layer in shapes.layers)
    return total


def disk(shapes: Shapes, placement: Placement, checkpoints: int) -> int:
    """Checkpoints (weights in their type; master and moments in 32 bits) and the final weights."""
    weights = shapes.trained * placement.element
    return (checkpoints + 1) * (weights + 3 * FP32 * shapes.trained) + weights


def as_json(found: Estimate) -> dict[str, Any]:
    """Plain numbers for a file."""
    return {
        "peak_bytes": found.peak,
        "slack_bytes": found.slack,
        "context_bytes": CONTEXT,
        "process_bytes": found.process,
        "needed_bytes": found.needed,
        "host_bytes": found.host,
        "disk_bytes": found.disk,
        "moment": found.moment,
        "terms": found.terms,
    }
