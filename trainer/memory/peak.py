"""The largest memory that this rank has used."""

import torch


def peak_memory_gib() -> float:
    """Largest memory this rank has used: on its GPU, or of the process on a CPU; GiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
