"""A process's place among the ranks, from the variables of whatever started it.

| started by                           | rank                 | ranks                 | rank on its host           |
|--------------------------------------|----------------------|-----------------------|----------------------------|
| deepspeed, torchrun                  | RANK                 | WORLD_SIZE            | LOCAL_RANK                 |
| Open MPI's mpirun                    | OMPI_COMM_WORLD_RANK | OMPI_COMM_WORLD_SIZE  | OMPI_COMM_WORLD_LOCAL_RANK |
| mpirun of MPICH and Intel MPI (PMI)  | PMI_RANK             | PMI_SIZE              | MPI_LOCALRANKID            |
| srun                                 | SLURM_PROCID         | SLURM_STEP_NUM_TASKS  | SLURM_LOCALID              |

The first complete row counts: below `mpirun` in a SLURM job the variables of srun are those of Open MPI's own daemon.
Not SLURM_NTASKS: a batch script has it as well, with SLURM_PROCID=0, and is no rank.
"""

import os
import re
import socket
from collections.abc import Mapping

from trainer.contract.ports import port_of_job

TORCH, OPEN_MPI, PMI, SRUN = "torch", "Open MPI", "MPICH", "SLURM"
FAMILIES = {
    TORCH: ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    OPEN_MPI: ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    PMI: ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    SRUN: ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}


def read_place(env: Mapping[str, str]) -> tuple[str | None, int, int, int]:
    """(who started this process, rank, number of ranks, rank on this host); (None, 0, 1, 0) if nothing says so.

    Raises ValueError for a place that cannot be.
    """
    for family, (rank_name, size_name, local_name) in FAMILIES.items():
        if rank_name in env and size_name in env:
            rank, size, local = int(env[rank_name]), int(env[size_name]), int(env.get(local_name, 0))
            if not 0 <= rank < size:
                raise ValueError(f"{rank_name}={rank}: must lie below {size_name}={size}")
            return family, rank, size, local
    if "RANK" in env:
        raise ValueError(f"RANK={env['RANK']} without WORLD_SIZE: the launcher must set both, or neither")
    return None, 0, 1, 0


def ranks_of_host(env: Mapping[str, str]) -> int | None:
    """How many ranks there are on this host; None if nothing says so."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    found = next((env[name] for name in names if name in env), "")
    return int(found) if found.isdigit() else None


def srun_meeting_point(env: Mapping[str, str]) -> tuple[str, int]:
    """Address and port at which the ranks of a SLURM step meet: its first node, and a port from the job's id."""
    return first_host(env["SLURM_STEP_NODELIST"]), port_of_job(int(env["SLURM_JOB_ID"]))


def first_host(node_list: str) -> str:
    """The first node of SLURM's short form: `gpu[003-006,9],login` begins with `gpu003`."""
    found = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", node_list)
    if found is None:
        raise ValueError(f"{node_list!r} is not a list of nodes")
    return "".join(part or "" for part in found.groups())


def host_name() -> str:
    """This host as the cluster calls it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
