"""Build the command that starts one process per GPU with the `mpirun` of Open MPI, MPICH or Intel MPI."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from launcher.targets.local import RANK_VARIABLES, Command, select_exported_variables
from trainer.config import UserError


def build_mpirun_command(
    arguments: Sequence[str],
    slots: Mapping[str, Sequence[int]],
    *,
    address: str | None = None,
    port: int | None = None,
    module: str = "trainer.train",
) -> Command:
    """Return the command that runs `module` as one rank for each slot of each host.

    Ranks on a host use its first GPUs. Raises UserError if `slots` lists other GPUs, or if mpirun is missing.
    """
    for host, gpus in slots.items():
        if list(gpus) != list(range(len(gpus))):
            raise UserError(
                f"--launcher mpi: ranks on {host} use its first GPUs; choose others with CUDA_VISIBLE_DEVICES"
            )
    ranks = sum(len(gpus) for gpus in slots.values())
    variables: dict[str, str] = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if address is not None and port is not None:
        # By default, the ranks find each other through mpi4py.
        variables |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    program = [sys.executable, "-u", "-m", module, *arguments, f"--world-size={ranks}"]
    exported = [*select_exported_variables(os.environ | variables), "PATH"]
    exported += [name for name in ("MASTER_ADDR", "MASTER_PORT") if name in variables]
    hosts = ",".join(f"{host}:{len(gpus)}" for host, gpus in slots.items())
    if shutil.which("mpirun") is None:
        raise UserError("--launcher mpi: mpirun is not installed; install Open MPI or MPICH, or load its module")
    result = subprocess.run(["mpirun", "--version"], capture_output=True, text=True)
    if "Open MPI" in result.stdout + result.stderr or "OpenRTE" in result.stdout + result.stderr:
        # By default, Open MPI may bind a rank with all its threads to a single core.
        argv = ["mpirun", "-np", str(ranks), "--host", hosts, "--bind-to", "none"]
        for name in dict.fromkeys(exported):
            argv += ["-x", name]
    else:
        argv = ["mpirun", "-n", str(ranks), "-hosts", hosts, "-genvlist", ",".join(dict.fromkeys(exported))]
    return Command((*argv, *program), ranks, variables, RANK_VARIABLES)
