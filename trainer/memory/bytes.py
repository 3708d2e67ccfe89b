"""The memory of one rank: what lies there all the time, what a micro-step adds, and which moment is the worst.

`peak` is what torch.cuda.max_memory_allocated() will say. What the driver reports is more: the CUDA context, NCCL's
buffers, and what torch's allocator holds without using it.
"""

from dataclasses import dataclass
from typing import Any

from trainer.memory.activations import (
    FP32,
    Work,
    backward_of_layer,
    kept_by_layers,
    loss_head,
    recomputed_layer,
)
from trainer.memory.process import PROCESS, process_peak
from trainer.memory.stored_weights import (
    GATHERED_LAYERS,
    Placement,
    base_weights,
    bytes_of,
    dequantised_experts,
    fetched_weights,
    gathered,
    held,
    quantisation_state,
    rounded_weight,
    share,
)
from trainer.memory.widths import Shapes

GIB = 2**30
CUBLAS_WORKSPACE = 2 * 32 * 2**20
"""cuBLAS works in 32 MiB on cards of compute capability 9.0, once for the thread of each direction."""
CONTEXT = 3 * GIB // 4
"""CUDA context, kernels and NCCL's buffers, which torch does not count."""
FRAGMENTATION = 0.04
"""Fraction of the peak that torch's allocator holds beyond it."""
EIGHT_BIT_FLOOR = 4096
"""bitsandbytes keeps the moments of smaller tensors in 32 bits."""


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
        "tables": shapes.buffers,
        "workspaces": CUBLAS_WORKSPACE if placement.on_gpu else 0,
        "dequantised experts": dequantised_experts(shapes, placement),
        "rounded weight": rounded_weight(shapes, placement),
        "communication buffers": standing_buckets(placement),
    }
    if seen is None:
        kept, head = kept_by_layers(shapes, work), loss_head(shapes, work)
        going_back = work.of_larger_pass
        block, of_layer = recomputed_layer(shapes, going_back), backward_of_layer(shapes, going_back)
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
    stored = any(weight.mxfp4 or weight.fp8_scales for weight in shapes.weights)
    streamed = placement.packed or stored or placement.stage == 3
    read = [weight.elements for weight in shapes.weights if not weight.factor]
    loading = max(read, default=0) if streamed else sum(read)
    return max(offloaded(shapes, work, placement), loading * placement.element)


def offloaded(shapes: Shapes, work: Work, placement: Placement) -> int:
    """What lies on the host and not on the card."""
    total = placement.base_states
    if placement.offload_optimizer:
        # Master, two moments, their gradient, and the updated weights on their way back.
        total += share(shapes.trained * (4 * FP32 + 2 * placement.element), placement, 1)
    if placement.offload_parameters:
        total += share(sum(bytes_of(w, placement) for w in fetched_weights(shapes, placement)), placement, 3)
    if work.offload_activations and work.recompute != "none":
        total += sum(work.tokens * layer.hidden * work.element for layer in shapes.layers[: work.recomputed_layers])
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
