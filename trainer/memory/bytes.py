"""Estimate the memory of one rank: permanent state, additional memory of a micro-step, and their peak.

`peak` predicts torch.cuda.max_memory_allocated(). The driver reports more, because it includes the CUDA context,
NCCL's buffers, and memory that torch's allocator has reserved but does not use.
"""

from dataclasses import dataclass
from typing import Any

from ops.reference import ELEMENTS_AT_ONCE
from trainer.config import OPTIMIZERS
from trainer.memory.activations import FP32_BYTES, Activations, MicroStep, loss_head_bytes
from trainer.memory.stored_weights import (
    GATHERED_LAYERS,
    ModelShapes,
    Placement,
    base_shard_size,
    base_weight_bytes,
    dequantized_expert_bytes,
    fake_quantization_bytes,
    gathered_bytes,
    list_gathered_weights,
    resident_bytes,
    scale_bytes,
    shard_size,
    stored_bytes,
)

GIB = 2**30
CUBLAS_WORKSPACE = 2 * 32 * 2**20
"""Bytes of cuBLAS's workspaces: 32 MiB (compute capability 9.0) in each of the forward and backward threads."""
CUDA_CONTEXT_BYTES = 3 * GIB // 4
"""Bytes of the CUDA context, kernels and NCCL's buffers, which torch does not count."""
FRAGMENTATION = 0.04
"""Memory that torch's allocator reserves beyond the peak, as a fraction of the peak."""
EIGHT_BIT_FLOOR = 4096
"""Number of elements below which bitsandbytes keeps a tensor's moments in fp32."""


@dataclass(frozen=True)
class Estimate:
    """Peak memory in bytes, broken down by purpose; the terms add up to `peak`."""

    terms: dict[str, int]
    moment: str
    host: int
    disk: int

    @property
    def peak(self) -> int:
        return sum(self.terms.values())

    @property
    def needed(self) -> int:
        return self.peak + self.slack + CUDA_CONTEXT_BYTES

    @property
    def slack(self) -> int:
        return int(self.peak * FRAGMENTATION)

    def to_json(self) -> dict[str, Any]:
        return {
            "peak_bytes": self.peak,
            "slack_bytes": self.slack,
            "context_bytes": CUDA_CONTEXT_BYTES,
            "needed_bytes": self.needed,
            "host_bytes": self.host,
            "disk_bytes": self.disk,
            "moment": self.moment,
            "terms": self.terms,
        }


def estimate(
    shapes: ModelShapes, micro_step: MicroStep | None, placement: Placement, activations: Activations, tower: int = 0
) -> Estimate:
    """Estimate the memory of one rank; `micro_step` is None for models without an LM head.

    `tower` is the number of bytes that a vision tower needs before the language model runs.
    """
    frozen = (weight for weight in shapes.weights if not weight.trained)
    scales = resident_bytes(sum(scale_bytes(weight, placement) for weight in frozen), placement)
    by_module = placement.zero.stage == 3 and not placement.by_layer
    has_adapter = any(weight.factor for weight in shapes.weights)
    resident = {
        "base model": base_weight_bytes(shapes, placement) - scales,
        "quantization state": scales,
        "adapter" if has_adapter else "trained weights": trained_weight_bytes(shapes, placement),
        "gradients": gradient_bytes(shapes, placement),
        "optimizer": optimizer_state_bytes(shapes, placement),
        "tables": shapes.buffers,
        "workspaces": CUBLAS_WORKSPACE + (16 * ELEMENTS_AT_ONCE if shapes.stored == "groups" else 0),
        "dequantized experts": dequantized_expert_bytes(shapes, placement),
        "rounded weight": fake_quantization_bytes(shapes, placement),
        # Only DeepSpeed's own stage 3 allocates its bucket at the start.
        "communication buffers": bucket_bytes(shapes, placement) if by_module else 0,
    }
    layers, outside = gathered_bytes(shapes, placement)
    moments: dict[str, dict[str, int]] = {
        "loss": {
            "activations": activations.kept,
            "logits and loss": 0 if micro_step is None else loss_head_bytes(shapes, micro_step),
            "gathered weights": layers // GATHERED_LAYERS + outside,
        },
        "backward": {
            "activations": activations.kept,
            "backward of a layer": activations.backward,
            "gathered weights": layers if placement.by_layer else layers + outside,
        },
        "vision tower": {"activations of the tower": tower},
        "gradients": {"reduction": reduction_bytes(shapes, placement)},
        "step": {"optimizer step": update_bytes(shapes, placement)},
    }
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    terms = {name: size for name, size in (resident | moments[moment]).items() if size}
    host = host_bytes(shapes, placement, activations.on_host)
    return Estimate(terms, moment, host, checkpoint_bytes(shapes, placement))


def trained_weight_bytes(shapes: ModelShapes, placement: Placement) -> int:
    """Return the bytes of trained weights in their compute dtype, partitioned at stage 3 unless gathered by layer."""
    size = shapes.trained_numel * placement.element_size
    return size if placement.by_layer else resident_bytes(size, placement)


def gradient_bytes(shapes: ModelShapes, placement: Placement) -> int:
    """Return the bytes of gradients accumulated from earlier micro-steps, partitioned at stage 2 or higher.

    DeepSpeed's stage 3 always allocates them, on the host if the optimizer is offloaded.
    """
    by_module = placement.zero.stage == 3 and not placement.by_layer
    if placement.zero.offload_optimizer if by_module else placement.training.gradient_accumulation_steps == 1:
        return 0
    return shard_size(shapes.trained_numel * placement.element_size, placement, 2)


def moment_bytes_per_element(shapes: ModelShapes, placement: Placement) -> float:
    """Return the optimizer moments' bytes per trained element; 8-bit moments have an fp32 scale per 256 elements."""
    kind = OPTIMIZERS[placement.training.optimizer]
    if kind.bits == 8 and shapes.trained_numel >= EIGHT_BIT_FLOOR:
        return len(kind.state) * (1.0 + FP32_BYTES / 256)
    return len(kind.state) * (FP32_BYTES if kind.bits == 8 else kind.bits / 8)


def optimizer_state_bytes(shapes: ModelShapes, placement: Placement) -> int:
    """Return the bytes of master weights (4 each) and moments, partitioned at stage 1 or higher.

    fp32 training at stage 0 has no master weights. With offloading, the GPU only has a gradient buffer for the largest
    tensor; LoRA factors in one buffer count as one tensor.
    """
    if placement.zero.offload_optimizer:
        factors = [weight.elements for weight in shapes.weights if weight.trained and weight.factor]
        others = [weight.elements for weight in shapes.weights if weight.trained and not weight.factor]
        largest = max(sum(factors) if placement.flat else max(factors, default=0), *others, 0)
        return largest * placement.element_size
    has_master = placement.has_master_weights or placement.zero.stage >= 1
    per_element = moment_bytes_per_element(shapes, placement) + (FP32_BYTES if has_master else 0)
    return shard_size(int(shapes.trained_numel * per_element), placement, 1)


def bucket_bytes(shapes: ModelShapes, placement: Placement) -> int:
    """Return the bytes of DeepSpeed's reduction buffer, which is capped at the number of trained elements."""
    return min(placement.zero.reduce_bucket_size, shapes.trained_numel) * placement.element_size


def reduction_bytes(shapes: ModelShapes, placement: Placement) -> int:
    """Return the bytes in use at the end of a backward pass: gradients, buckets, and the assembled flat gradient.

    There is one bucket, or two if communication overlaps.
    """
    gradients = shapes.trained_numel * placement.element_size * (3 if placement.flat else 1)
    if placement.zero.stage == 0 or (placement.zero.stage == 3 and not placement.by_layer):
        return gradients
    overlaps = placement.zero.overlap_comm and not placement.flat
    return gradients + bucket_bytes(shapes, placement) * (2 if overlaps else 1)


def update_bytes(shapes: ModelShapes, placement: Placement) -> int:
    """Return the bytes of gradients during the update, including two fp32 copies in 16-bit training."""
    if placement.zero.offload_optimizer:
        return shapes.trained_numel * placement.element_size
    copies = shard_size(shapes.trained_numel * FP32_BYTES, placement, 1) if placement.has_master_weights else 0
    return shapes.trained_numel * placement.element_size + 2 * copies


def host_bytes(shapes: ModelShapes, placement: Placement, activation_bytes: int = 0) -> int:
    """Return the bytes of host memory that one rank needs in addition to the process itself.

    This is the larger of the offloaded tensors (including `activation_bytes` bytes) and the weights held during
    loading.
    """
    stored = bool(shapes.stored) or any(weight.mxfp4 for weight in shapes.weights)
    streamed = placement.packed or stored or placement.zero.stage == 3
    read = [weight.elements for weight in shapes.weights if not weight.factor]
    loading = max(read, default=0) if streamed else sum(read)
    return max(offloaded_bytes(shapes, placement) + activation_bytes, loading * placement.element_size)


def offloaded_bytes(shapes: ModelShapes, placement: Placement) -> int:
    total = placement.base_states
    if placement.zero.offload_optimizer:
        # Master weights, two moments, their gradient, and the updated weights to be copied back.
        total += shard_size(shapes.trained_numel * (4 * FP32_BYTES + 2 * placement.element_size), placement, 1)
    if placement.zero.offload_parameters:
        gathered = list_gathered_weights(shapes, placement)
        total += base_shard_size(sum(stored_bytes(weight, placement) for weight in gathered), placement)
    return total


def checkpoint_bytes(shapes: ModelShapes, placement: Placement) -> int:
    """Return the bytes on disk of the final weights and of all checkpoints, including one that is being written.

    A checkpoint contains the weights, and the master weights and moments in fp32.
    """
    checkpoints = (placement.training.save_total_limit or 1) + int(placement.training.best_checkpoint)
    weights = shapes.trained_numel * placement.element_size
    return (checkpoints + 1) * (weights + 3 * FP32_BYTES * shapes.trained_numel) + weights
