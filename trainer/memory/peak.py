"""The largest memory that this rank has used, and what its allocator holds in pieces."""

import torch

FRAGMENTED = 0.1
"""Fraction of the GPU's memory in free pieces of blocks in use, above which they are worth giving back."""

_BEFORE = [0]
"""The largest allocation before the last `measure_again`."""


def measure_again() -> None:
    """Let torch's peak begin again, for what is done from here on; `peak_memory_gib` remembers the one so far."""
    if torch.cuda.is_available():
        _BEFORE[0] = max(_BEFORE[0], torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()


def peak_memory_gib() -> float:
    """Largest memory this rank has used: on its GPU, or of the process on a CPU; GiB."""
    if torch.cuda.is_available():
        return max(_BEFORE[0], torch.cuda.max_memory_allocated()) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def release_if_fragmented() -> bool:
    """After an evaluation, whose shapes are others than training's: empty torch's cache where it lies in pieces."""
    if not torch.cuda.is_available():
        return False
    in_pieces = torch.cuda.memory_stats().get("inactive_split_bytes.all.current", 0)
    if in_pieces <= FRAGMENTED * torch.cuda.mem_get_info()[1]:
        return False
    torch.cuda.empty_cache()
    return True
