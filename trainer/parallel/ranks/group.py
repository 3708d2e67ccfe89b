"""Form the process group of all ranks, and the groups that share a frozen base model."""

import atexit
import datetime
import importlib
import os
import random
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

import numpy
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from trainer.config import UserError
from trainer.contract.known_versions import patch_attribute, replaces, require
from trainer.contract.rendezvous import (
    OPEN_MPI,
    PMI,
    RANK_VARIABLES_BY_LAUNCHER,
    SRUN,
    find_free_port,
    format_port_error,
    get_host_name,
    read_rank_variables,
    read_srun_rendezvous,
)
from trainer.parallel.ranks.progress import phase

T = TypeVar("T")
ShardScope = Literal["auto", "host", "all"] | int


@dataclass(frozen=True)
class Ranks:
    """The global rank and local rank of this process, and the world size."""

    rank: int
    world_size: int
    local_rank: int

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @classmethod
    def from_environment(
        cls, environment: dict[str, str] | None = None, *, expected_world_size: int | None = None
    ) -> "Ranks":
        """Read this process's ranks from the launcher's environment variables; default to a single rank.

        Raises UserError if the number of ranks is not `expected_world_size`, or if the variables contradict each other.
        """
        try:
            _, rank, world_size, local_rank = read_rank_variables(os.environ if environment is None else environment)
        except ValueError as error:
            raise UserError(str(error)) from None
        if expected_world_size not in (None, world_size):
            raise UserError(
                f"{expected_world_size} ranks were requested, but the environment on {get_host_name()} sets "
                f"rank {rank} of {world_size}; start with `zerolora train --launcher ...`, which sets the variables"
            )
        return cls(rank, world_size, local_rank)

    def device(self) -> torch.device:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        # Some clusters show each process only its own GPU (`srun --gpus-per-task`), with index 0.
        return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else self.local_rank)


def form_process_group(ranks: Ranks, timeout_minutes: float) -> None:
    """Join the process group of all ranks: NCCL on GPUs, gloo on CPUs.

    Raises UserError if the port is taken, this rank has no GPU, or MPI started the ranks and mpi4py is missing.
    """
    if dist.is_initialized():
        return
    import deepspeed

    set_rendezvous_variables(ranks)
    device = ranks.device()
    if device.type == "cuda":
        if device.index >= torch.cuda.device_count():
            raise UserError(
                f"rank {ranks.rank} has local rank {ranks.local_rank} on {get_host_name()}, but sees only "
                f"{torch.cuda.device_count()} GPUs; start one rank per GPU"
            )
        torch.cuda.set_device(device)
        # DeepSpeed reads the index of its device here, and requires the same value in Open MPI's variable.
        os.environ["LOCAL_RANK"] = str(device.index)
        if RANK_VARIABLES_BY_LAUNCHER[OPEN_MPI][2] in os.environ:
            os.environ[RANK_VARIABLES_BY_LAUNCHER[OPEN_MPI][2]] = str(device.index)
    try:
        with skip_shm_build():
            deepspeed.init_distributed(
                dist_backend="nccl" if device.type == "cuda" else "gloo",
                auto_mpi_discovery=False,  # already done by set_rendezvous_variables
                timeout=datetime.timedelta(minutes=timeout_minutes),
                verbose=False,
            )
    except dist.DistNetworkError as error:
        raise explain_taken_port(error) from None


@replaces("DeepSpeed's shared-memory all-reduce for CPU ranks")
def skip_shm_build() -> AbstractContextManager[None]:
    """Skip the build of DeepSpeed's shared-memory all-reduce for CPUs.

    Only tensor parallelism uses it. It takes 40 s to compile on two cores, both on the first run and whenever
    another environment with the same Python version has replaced the build. Each rank of a host would also
    leave 66 MiB in /dev/shm (DeepSpeed 0.19.8, shm.cpp).
    """
    backend = importlib.import_module("deepspeed.comm.torch")  # as an attribute, deepspeed.comm.torch is torch itself
    return patch_attribute(backend, "build_shm_op", lambda: None, "deepspeed")


def explain_taken_port(error: dist.DistNetworkError) -> Exception:
    """Convert a port conflict, seen only by rank 0, to a UserError about --master-port; return others unchanged."""
    if "EADDRINUSE" not in str(error):
        return error
    return UserError(format_port_error(int(os.environ["MASTER_PORT"]), "Address already in use", get_host_name()))


@replaces("the timeouts of DeepSpeed's process groups")
def set_process_group_timeouts(minutes: float) -> None:
    """Set the timeout of all process groups; DeepSpeed creates one with torch's default (10 minutes for NCCL)."""
    if dist.is_initialized():
        set_timeout = require(distributed_c10d, "_set_pg_timeout", "torch")
        for group in list(require(require(distributed_c10d, "_world", "torch"), "pg_map", "torch")):
            set_timeout(datetime.timedelta(minutes=minutes), group)


def set_rendezvous_variables(ranks: Ranks) -> None:
    """Set torch's rendezvous variables, unless the launcher has set them.

    Raises UserError if MPI started the ranks and mpi4py is not installed.
    """
    family = read_rank_variables(os.environ)[0]
    os.environ |= {"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.world_size), "LOCAL_RANK": str(ranks.local_rank)}
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return
    address, port = "127.0.0.1", 29500 if ranks.world_size > 1 else find_free_port()
    if ranks.world_size > 1 and family in (OPEN_MPI, PMI):
        _discover_through_mpi(ranks)
    elif ranks.world_size > 1 and family == SRUN:
        address, port = read_srun_rendezvous(os.environ)
    os.environ.setdefault("MASTER_ADDR", address)
    os.environ.setdefault("MASTER_PORT", str(port))


def _discover_through_mpi(ranks: Ranks) -> None:
    """Set rank 0's address and a free port on all ranks through DeepSpeed's MPI discovery, which needs mpi4py."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        fix = "run `pip install mpi4py`, or set MASTER_ADDR and MASTER_PORT on every rank (mpirun -x)"
        raise UserError(f"mpi4py: {error}, but ranks started by mpirun need it to find each other; {fix}") from None
    from deepspeed.comm.comm import mpi_discovery

    port = MPI.COMM_WORLD.bcast(find_free_port() if ranks.is_main else None)
    mpi_discovery(distributed_port=port, verbose=False)


def leave_process_group(*, wait_for_all: bool = False) -> None:
    """Destroy the process group. Ranks that skip this sometimes abort at exit.

    With `wait_for_all`, first waits for all ranks: mpirun kills all others as soon as one rank exits with a nonzero
    code.
    """
    if dist.is_initialized():
        if wait_for_all:
            dist.barrier()
        dist.destroy_process_group()


def exit_process(exit_code: int) -> NoReturn:
    """Exit without running C++ destructors, in which gloo threads sometimes abort.

    Threads are joined, exit handlers run and output is flushed, as in a normal exit. Under MPI, this is a
    normal exit, because MPI must be finalized.
    """
    if "mpi4py.MPI" in sys.modules:
        sys.exit(exit_code)
    threading._shutdown()  # type: ignore[attr-defined]  # joins all threads, including executors'
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a pipe without a reader, a closed stream
            stream.flush()
    os._exit(exit_code)


@phase("reduce")
def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all ranks, in place."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def gather_objects(value: Any) -> list[Any]:
    values = [value]
    if dist.is_initialized() and (size := dist.get_world_size()) > 1:
        values *= size
        dist.all_gather_object(values, value)
    return values


def run_on_main(ranks: Ranks, compute: Callable[[], T]) -> T:
    """Run `compute` on rank 0, and return its result or raise its UserError on every rank; a collective call."""
    answer: T | UserError | None = None
    if ranks.is_main:
        try:
            answer = compute()
        except UserError as error:
            answer = error
    result: T | UserError = gather_objects(answer)[0]
    if isinstance(result, UserError):
        raise result
    return result


def assign_batches(batches: Sequence[T], ranks: Ranks) -> Sequence[T]:
    """Return this rank's batches. Some ranks also repeat the first batch, so that all ranks have the same number."""
    rank_batches = batches[ranks.rank :: ranks.world_size]
    return [*rank_batches, batches[0]] if len(rank_batches) * ranks.world_size < len(batches) else rank_batches


def wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def set_seed(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def list_shard_groups(within: ShardScope, hosts: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each group that shards one copy of the frozen base model (zero.shard_within).

    `hosts` lists each rank's host; `auto` means one group of all ranks. Raises UserError if the ranks cannot be divided
    into groups of `within`.
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    if within == "host":
        return list(by_host.values())
    ordered = [rank for ranks in by_host.values() for rank in ranks]
    if not isinstance(within, int):
        return [ordered]
    if len(ordered) % within:
        raise UserError(
            f"zero.shard_within={within}: {len(ordered)} ranks cannot be divided into groups of {within}; use host, "
            "all or a divisor of the number of ranks"
        )
    return [ordered[start : start + within] for start in range(0, len(ordered), within)]


def create_shard_group(within: ShardScope, hosts: Sequence[str]) -> dist.ProcessGroup | None:
    """Create the shard groups and return this rank's group; None if there is only one group. A collective call."""
    groups = list_shard_groups(within, hosts)
    if len(groups) == 1:
        return None
    formed = [(ranks, dist.new_group(ranks)) for ranks in groups]
    return next(group for ranks, group in formed if dist.get_rank() in ranks)
