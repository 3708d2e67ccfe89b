"""The memory of a rank on a CPU: a process with interpreter, libraries, tensors, and gaps in the heap."""

from pathlib import Path

import psutil

from ops.head import LOGITS_AT_ONCE
from trainer.memory.activations import FP32, Seen, Work, loss_head
from trainer.memory.widths import Shapes

PROCESS = 550 * 2**20
"""Python, torch, transformers, DeepSpeed and gloo in a process that has trained a tiny model."""
LEFT_IN_HEAP = 0.7
"""Free memory in the C library's heap at the peak, as a fraction of what all layers keep: little of what is freed
between live tensors is returned. Measured 0.4 to 0.9 in fp32 and bf16, 256 to 7,168 tokens, recomputed and not."""
CGROUP = Path("/sys/fs/cgroup")


def process_peak(shapes: Shapes, work: Work | None, resident: int, seen: Seen) -> int:
    """Return the peak resident memory of a process with `resident` bytes of weights, optimizer state and buffers."""
    if work is None:
        return PROCESS + resident + seen.kept + seen.backward
    return PROCESS + resident + seen.kept + seen.block + int(LEFT_IN_HEAP * seen.whole) + _loss(shapes, work)


def _loss(shapes: Shapes, work: Work) -> int:
    """Return the bytes of the loss: without a GPU kernel, logits of a chunk, their 32-bit log-probabilities, a copy."""
    if not work.fused_loss:
        return loss_head(shapes, work)
    chunk = min(work.rows * min(work.targets, work.kernels.length) * shapes.vocabulary, LOGITS_AT_ONCE)
    return loss_head(shapes, work) + chunk * (FP32 if work.element == FP32 else 2 * FP32)


def host_memory_left() -> tuple[int, int]:
    """Return the free and the total bytes of this host, or of its control group if that is limited."""
    memory = psutil.virtual_memory()
    free, total = int(memory.available), int(memory.total)
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no control group, or `max`
        return free, total
    return min(free, limit - used), min(total, limit)
