"""Peak memory of this rank, and fragmentation of its allocator."""

import torch

FRAGMENTED = 0.1
"""Fraction of the GPU's memory in free pieces of used blocks above which the cache is emptied."""


def peak_memory_gib() -> float:
    """Return the peak memory of this rank's GPU, or of its process on a CPU, in GiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def release_if_fragmented() -> bool:
    """Empty torch's cache if it is fragmented, as after an evaluation with other shapes than training."""
    if not torch.cuda.is_available():
        return False
    in_pieces = torch.cuda.memory_stats().get("inactive_split_bytes.all.current", 0)
    if in_pieces <= FRAGMENTED * torch.cuda.mem_get_info()[1]:
        return False
    torch.cuda.empty_cache()
    return True
