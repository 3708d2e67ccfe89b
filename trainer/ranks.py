"""Which of the run's processes this one is, and the process group they form."""

import datetime
import os
import random
from dataclasses import dataclass

import numpy
import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """This process among all: `rank` of `world_size`, `local_rank` on its host."""

    rank: int
    world_size: int
    local_rank: int

    @property
    def is_main(self) -> bool:
        """True for the one rank that talks and writes."""
        return self.rank == 0

    @classmethod
    def from_environment(cls, environment: dict[str, str] | None = None) -> "Ranks":
        """Read the variables that deepspeed and torchrun set; a process without them is a run of one rank."""
        env = os.environ if environment is None else environment
        ranks = cls(int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1)), int(env.get("LOCAL_RANK", 0)))
        if not 0 <= ranks.rank < ranks.world_size:
            raise ValueError(f"RANK={ranks.rank}: must lie below WORLD_SIZE={ranks.world_size}")
        return ranks

    def device(self) -> torch.device:
        """The device this rank computes on."""
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")


def form_process_group(ranks: Ranks, timeout_minutes: float) -> None:
    """Join the process group of all ranks: NCCL on GPUs, gloo on CPUs."""
    if dist.is_initialized():
        return
    import deepspeed

    for name, value in (("RANK", ranks.rank), ("WORLD_SIZE", ranks.world_size), ("LOCAL_RANK", ranks.local_rank)):
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500" if ranks.world_size > 1 else str(_free_port()))
    device = ranks.device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    deepspeed.init_distributed(
        dist_backend="nccl" if device.type == "cuda" else "gloo",
        auto_mpi_discovery=False,
        timeout=datetime.timedelta(minutes=timeout_minutes),
        verbose=False,
    )


def leave_process_group() -> None:
    """End the process group; ranks that skip this abort now and then at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all ranks, in place."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def set_seed(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
