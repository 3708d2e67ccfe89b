"""Read a process's rank from environment variables, and choose addresses and ports for a run.

| started by                           | rank                 | ranks                 | rank on its host           |
|--------------------------------------|----------------------|-----------------------|----------------------------|
| deepspeed, torchrun                  | RANK                 | WORLD_SIZE            | LOCAL_RANK                 |
| Open MPI's mpirun                    | OMPI_COMM_WORLD_RANK | OMPI_COMM_WORLD_SIZE  | OMPI_COMM_WORLD_LOCAL_RANK |
| mpirun of MPICH and Intel MPI (PMI)  | PMI_RANK             | PMI_SIZE              | MPI_LOCALRANKID            |
| srun                                 | SLURM_PROCID         | SLURM_STEP_NUM_TASKS  | SLURM_LOCALID              |

The first complete row applies: with `mpirun` in a SLURM job, srun's variables belong to Open MPI's daemon.
SLURM_NTASKS is not used, because it is also set in a batch script (with SLURM_PROCID=0), which is not a rank.
"""

import os
import re
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress

from trainer.config.errors import UserError

TORCH, OPEN_MPI, PMI, SRUN = "torch", "Open MPI", "MPICH", "SLURM"
RANK_VARIABLES_BY_LAUNCHER = {
    TORCH: ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    OPEN_MPI: ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    PMI: ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    SRUN: ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}
FIRST_PORT, PORTS = 10_000, 20_000
"""Range of rendezvous ports: above common services, below the ephemeral port range (from 32768 on Linux)."""


def read_rank_variables(env: Mapping[str, str]) -> tuple[str | None, int, int, int]:
    """Return (launcher, rank, number of ranks, rank on this host), or (None, 0, 1, 0) without a launcher.

    Raises ValueError for inconsistent variables.
    """
    for family, (rank_name, size_name, local_name) in RANK_VARIABLES_BY_LAUNCHER.items():
        if rank_name in env and size_name in env:
            rank, size, local = int(env[rank_name]), int(env[size_name]), int(env.get(local_name, 0))
            if not 0 <= rank < size:
                raise ValueError(f"{rank_name}={rank}: must be below {size_name}={size}")
            return family, rank, size, local
    if "RANK" in env:
        raise ValueError(f"RANK={env['RANK']}: WORLD_SIZE is missing; the launcher must set both or neither")
    return None, 0, 1, 0


def read_srun_rendezvous(env: Mapping[str, str]) -> tuple[str, int]:
    """Return the rendezvous address and port for a SLURM step: its first node, and its job's port."""
    return parse_first_host(env["SLURM_STEP_NODELIST"]), compute_job_port(int(env["SLURM_JOB_ID"]))


def parse_first_host(node_list: str) -> str:
    """Return the first node of a SLURM node list, such as `gpu003` for `gpu[003-006,9],login`."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", node_list)
    if match is None:
        raise ValueError(f"{node_list!r} is not a node list")
    return "".join(part or "" for part in match.groups())


def get_host_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def choose_random_port() -> int:
    """Return a port that is probably free on another host."""
    return FIRST_PORT + secrets.randbelow(PORTS)


def find_free_port() -> int:
    """Return a free port below the ephemeral port range. Raises UserError after 100 attempts."""
    for _ in range(100):
        port = choose_random_port()
        with socket.socket() as listener, suppress(OSError):  # the port is in use
            listener.bind(("", port))
            return port
    raise UserError(
        f"no free port found from {FIRST_PORT} to {FIRST_PORT + PORTS - 1}; use --master-port PORT, or set MASTER_PORT"
    )


def describe_port_problem(port: int) -> str:
    """Return the reason why a port on this host cannot be used; an empty string if the port is free."""
    with socket.socket() as listener:
        # The ranks' store also sets this, so that a recently used port can be reused.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def format_port_error(port: int, reason: str, host: str = "this host") -> str:
    return f"--master-port {port}: not free on {host} ({reason}); use another port, or omit the option"


def compute_job_port(job_id: int) -> int:
    """Return the rendezvous port of a SLURM job: the same on every node, but different for close job IDs."""
    return FIRST_PORT + job_id % PORTS
