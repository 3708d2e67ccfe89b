"""Read SLURM allocations, and build the `srun` command that starts one process per GPU in them.

srun starts the ranks directly, without DeepSpeed's launcher: it is faster (docs/guide/several-machines.md lists
start-up times), reports every rank's exit code, and forwards SIGUSR1 to all ranks.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from launcher.targets.hostfile import filter_slots
from launcher.targets.local import Command
from trainer.config import UserError
from trainer.contract.default_ranks import is_in_allocation, read_ranks_per_node
from trainer.contract.rendezvous import compute_job_port

NODE_TIMEOUT_S = 60.0
RETRY_AFTER_S = 10.0
# SLURM appends an asterisk to the state of an unresponsive node: "down*", "mixed*".
_LOST_STATE = re.compile(r"down|fail|\*$", re.I)


@dataclass(frozen=True)
class Allocation:
    job_id: int
    nodes: tuple[str, ...]
    ranks_per_node: int

    @property
    def port(self) -> int:
        return compute_job_port(self.job_id)


def read_allocation(env: Mapping[str, str], **filters: Any) -> Allocation:
    """Return the nodes of this allocation that pass the filters. Raises UserError outside an allocation."""
    if not is_in_allocation(env):
        raise UserError(
            "--launcher slurm: not inside a SLURM allocation; use `zerolora submit CONFIG`, or run this in `salloc` or "
            "in a batch script"
        )
    if not env["SLURM_JOB_ID"].isdecimal() or not env.get("SLURM_JOB_NODELIST"):
        values = ", ".join(f"{name}={env.get(name, '')}" for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"))
        raise UserError(f"--launcher slurm: {values}: not valid for a SLURM job; run this in a job, or unset them")
    if env.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        raise UserError(
            f"--launcher slurm: srun has started this command {env['SLURM_STEP_NUM_TASKS']} times; start it without "
            "srun, which it calls itself, or start `zerolora-rank CONFIG` with srun"
        )
    for option, text in (("--include", filters.get("include")), ("--exclude", filters.get("exclude"))):
        if text and ":" in text:
            raise UserError(f"{option} {text}: SLURM can only filter whole nodes; use --num-gpus, or a smaller job")
    names = _expand_node_list(env["SLURM_JOB_NODELIST"])
    limit = read_ranks_per_node(env)
    # If the job does not set the number of ranks per node, --num-gpus does.
    slots = {name: list(range(limit or filters.get("num_gpus") or 1)) for name in names}
    slots = filter_slots(slots, **filters)
    return Allocation(int(env["SLURM_JOB_ID"]), tuple(slots), len(next(iter(slots.values()))))


def build_srun_command(
    arguments: Sequence[str],
    allocation: Allocation,
    *,
    address: str | None = None,
    port: int | None = None,
    module: str = "trainer.train",
) -> Command:
    ranks = len(allocation.nodes) * allocation.ranks_per_node
    options = [
        f"--nodes={len(allocation.nodes)}",
        f"--nodelist={','.join(allocation.nodes)}",
        f"--ntasks={ranks}",
        f"--ntasks-per-node={allocation.ranks_per_node}",
        "--distribution=block",
        "--overlap",  # this process may itself be a step, as in `salloc`
        "--export=ALL",
        "--mpi=none",
        # The supervisor kills the other ranks after a failure, once they have had time to report.
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--unbuffered",
    ]
    if "SLURM_CPUS_PER_TASK" in os.environ:
        options.append(f"--cpus-per-task={os.environ['SLURM_CPUS_PER_TASK']}")  # not inherited by srun since 22.05
    variables = {
        "MASTER_ADDR": address or allocation.nodes[0],
        "MASTER_PORT": str(port or allocation.port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or os.environ.get("SLURM_CPUS_PER_TASK", "1"),
    }
    argv = ["srun", *options, sys.executable, "-u", "-m", module, *arguments, f"--world-size={ranks}"]
    return Command(tuple(argv), ranks, variables, ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))


def detect_lost_nodes(allocation: Allocation) -> list[str]:
    """Return the nodes that SLURM has marked as lost, or else those that cannot run a minimal step.

    SLURM detects a lost node after SlurmdTimeout, usually five minutes. It then cancels the job, and no node
    can start a step. Nodes also cannot start steps for a few seconds after slurmctld restarts, so nodes that do
    not respond are tried twice.
    """
    command = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(allocation.nodes)}", "--format=%N %T"]
    listing = subprocess.run(command, capture_output=True, text=True).stdout
    states = [line.split() for line in listing.splitlines()]
    if lost := [fields[0] for fields in states if len(fields) == 2 and _LOST_STATE.search(fields[1])]:
        return list(dict.fromkeys(lost))  # a node is listed once per partition
    if silent := _detect_unresponsive_nodes(allocation.nodes):
        time.sleep(RETRY_AFTER_S)
    return _detect_unresponsive_nodes(silent)


def can_be_requeued(job_id: int) -> bool:
    """Return whether SLURM may requeue the job, i.e. it is a batch job submitted with `--requeue`."""
    description = subprocess.run(["scontrol", "show", "job", str(job_id)], capture_output=True, text=True).stdout
    return all(re.search(rf"\b{flag}=1\b", description) for flag in ("Requeue", "BatchFlag"))


def _detect_unresponsive_nodes(nodes: Sequence[str]) -> list[str]:
    with ThreadPoolExecutor(max_workers=64) as pool:
        responding = list(pool.map(_is_responding, nodes))
    return [node for node, responds in zip(nodes, responding, strict=True) if not responds]


def _is_responding(node: str) -> bool:
    step = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--mpi=none", "--input=none", "true"]
    try:
        return subprocess.run(step, capture_output=True, timeout=NODE_TIMEOUT_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _expand_node_list(node_list: str) -> list[str]:
    try:
        command = ["scontrol", "show", "hostnames", node_list]
        listing = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        problem = f"scontrol cannot list its nodes ({reason})"
        fix = "run this on a host of the cluster, or use another launcher"
        raise UserError(f"SLURM_JOB_NODELIST={node_list}: {problem}; {fix}") from None
    return listing.stdout.split()
