"""Find the GPUs in this machine, and the default number of ranks for `zerolora train`."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.config.errors import UserError

CPU_RANKS = 2


def choose_default_ranks() -> int:
    """Return the default number of ranks, from the SLURM job or, outside a job, from this machine's GPUs.

    Raises UserError if CUDA_VISIBLE_DEVICES names GPUs that do not exist.
    """
    if is_in_allocation(os.environ):
        return int(os.environ.get("SLURM_JOB_NUM_NODES") or 1) * (read_ranks_per_node(os.environ) or 1)
    return len(list_visible_gpus()) or CPU_RANKS


def list_visible_gpus() -> list[int]:
    """Return the indices of this machine's NVIDIA GPUs that CUDA_VISIBLE_DEVICES allows, without importing torch.

    Raises UserError if CUDA_VISIBLE_DEVICES names GPUs that do not exist.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return []
    identifiers = list_installed_gpus()
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not identifiers or allowed is None:
        return list(range(len(identifiers)))
    return select_gpus(identifiers, allowed)


def select_gpus(identifiers: Sequence[str], allowed: str) -> list[int]:
    """Return the indices in `identifiers` (UUIDs in the driver's order) that a CUDA_VISIBLE_DEVICES value selects.

    As in CUDA, entries are indices or prefixes of UUIDs, and the list ends at -1. Raises UserError for other entries.
    """
    chosen: list[int] = []
    for entry in (entry.strip() for entry in allowed.split(",")):
        if entry in ("", "-1", "NoDevFiles"):
            break
        if entry.startswith("MIG"):
            raise UserError(
                f"CUDA_VISIBLE_DEVICES={allowed}: deepspeed cannot start on a MIG slice; "
                "use `torchrun --nproc-per-node 1 --no-python zerolora-rank CONFIG`"
            )
        if entry.isdigit():
            matches = [int(entry)] if int(entry) < len(identifiers) else []
        else:
            matches = [index for index, identifier in enumerate(identifiers) if identifier.startswith(entry)]
        if len(matches) != 1:
            raise UserError(
                f"CUDA_VISIBLE_DEVICES={allowed}: {entry} is not one of this machine's {len(identifiers)} GPUs; "
                "`nvidia-smi -L` lists them"
            )
        if matches[0] in chosen:
            raise UserError(f"CUDA_VISIBLE_DEVICES={allowed}: {entry} is listed twice; keep one")
        chosen += matches
    return chosen


def list_installed_gpus() -> list[str]:
    """Return the UUIDs of the GPUs, or the names of their device files if nvidia-smi is not installed."""
    if shutil.which("nvidia-smi"):
        try:
            listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"nvidia-smi -L: {error}; fix the driver, or set DS_ACCELERATOR=cpu") from None
        # "GPU 0: NVIDIA H200 (UUID: GPU-4c1d...)", with an indented line for each MIG slice below it.
        gpus = [line for line in listing.stdout.splitlines() if line.startswith("GPU ")]
        return [line.rpartition("UUID: ")[2].rstrip(") ") for line in gpus]
    return sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))


def is_in_allocation(env: Mapping[str, str]) -> bool:
    """Return whether this process is in a SLURM job and can start job steps with `srun`."""
    return "SLURM_JOB_ID" in env and shutil.which("srun") is not None


def read_ranks_per_node(env: Mapping[str, str]) -> int | None:
    """Return the requested GPUs per node, else the allocated ones, else the tasks per node; None if no count is set.

    With `--exclusive`, all GPUs of a node are allocated, even if fewer were requested.
    """
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_NTASKS_PER_NODE"):
        # The value may include the GPU type, as in `h200:8`.
        count = env.get(name, "").rpartition(":")[2]
        if count.isdigit() and int(count):
            return int(count)
    return None
