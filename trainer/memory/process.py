"""The memory of a rank on a CPU: one process with interpreter, libraries, tensors, and the heap's gaps between them."""

from pathlib import Path

import psutil

from ops.head import LOGITS_AT_ONCE
from trainer.memory.activations import (
    FP32,
    Work,
    kept_by_layer,
    kept_by_layers,
    loss_head,
    recomputed_layer,
)
from trainer.memory.widths import Shapes

PROCESS = 550 * 2**20
"""Python, torch, transformers, DeepSpeed and gloo in a process that has trained a model of next to nothing."""
LEFT_IN_HEAP = 0.7
"""Fraction of what all layers keep that the C library's heap holds beside it at the peak: it returns little of what
is freed between tensors that stay. Measured in fp32 and bf16, 256 to 7,168 tokens, recomputed and not: 0.4 to 0.9."""
CGROUP = Path("/sys/fs/cgroup")


def process_peak(shapes: Shapes, work: Work, resident: int) -> int:
    """Peak resident memory of a process whose weights, optimizer and buffers take `resident` bytes."""
    kept = kept_by_layers(shapes, work) + recomputed_layer(shapes, work.of_larger_pass)
    in_gaps = int(LEFT_IN_HEAP * sum(kept_by_layer(layer, work) for layer in shapes.layers))
    return PROCESS + resident + kept + in_gaps + _loss(shapes, work)


def _loss(shapes: Shapes, work: Work) -> int:
    """Without a GPU's kernel a chunk's logits have log-probabilities in 32 bits beside them, and a copy in 16 bits."""
    if not work.fused_loss:
        return loss_head(shapes, work)
    chunk = min(work.rows * min(work.targets, work.length) * shapes.vocabulary, LOGITS_AT_ONCE)
    return loss_head(shapes, work) + chunk * (FP32 if work.element == FP32 else 2 * FP32)


def host_memory_left() -> tuple[int, int]:
    """Bytes of this host, or of the control group it is limited to, that are free, and all of them."""
    memory = psutil.virtual_memory()
    free, total = int(memory.available), int(memory.total)
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no control group, or `max`
        return free, total
    return min(free, limit - used), min(total, limit)
