"""SLURM allocations, and the `srun` command that starts one process per GPU in them.

srun starts the ranks directly, not DeepSpeed's launcher on each node: it starts faster (docs/guide/several-machines.md
has times), knows every rank's exit code, and forwards SIGUSR1 to all ranks.
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

from launcher.targets.hostfile import choose_slots
from launcher.targets.local import Command
from trainer.config import UserError
from trainer.contract.default_ranks import in_allocation, ranks_per_node
from trainer.contract.rendezvous import job_port

NODE_TIMEOUT_S = 60.0
RETRY_AFTER_S = 10.0
# "down*", "mixed*": the asterisk is SLURM's for a node that does not respond.
_LOST = re.compile(r"down|fail|\*$", re.I)


@dataclass(frozen=True)
class Allocation:
    """The nodes of a job, and the number of ranks per node."""

    job_id: int
    nodes: tuple[str, ...]
    ranks_per_node: int

    @property
    def port(self) -> int:
        """Port at which the ranks meet."""
        return job_port(self.job_id)


def read_allocation(env: Mapping[str, str], **filters: Any) -> Allocation:
    """Return this process's allocation after the filters. Raises UserError outside of an allocation."""
    if not in_allocation(env):
        raise UserError(
            "--launcher slurm: not inside a SLURM allocation; `zerolora submit CONFIG` makes one, or run this in "
            "`salloc` or in a batch script"
        )
    if not env["SLURM_JOB_ID"].isdecimal() or not env.get("SLURM_JOB_NODELIST"):
        found = ", ".join(f"{name}={env.get(name, '')}" for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"))
        raise UserError(f"--launcher slurm: {found} is not the environment of a job; start it in `salloc` or a script")
    if env.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        raise UserError(
            f"--launcher slurm: srun has started this command {env['SLURM_STEP_NUM_TASKS']} times; start it once "
            "(it calls srun itself), or start `zerolora-rank CONFIG` with srun"
        )
    for option, text in (("--include", filters.get("include")), ("--exclude", filters.get("exclude"))):
        if text and ":" in text:
            raise UserError(f"{option} {text}: under SLURM whole nodes are chosen; use --num-gpus, or a smaller job")
    names = _host_names(env["SLURM_JOB_NODELIST"])
    limit = ranks_per_node(env)
    # A job without a number of ranks per node takes as many as the user wants.
    slots = {name: list(range(limit or filters.get("num_gpus") or 1)) for name in names}
    slots = choose_slots(slots, **filters)
    return Allocation(int(env["SLURM_JOB_ID"]), tuple(slots), len(next(iter(slots.values()))))


def srun_command(
    arguments: Sequence[str],
    allocation: Allocation,
    *,
    address: str | None = None,
    port: int | None = None,
    module: str = "trainer.train",
) -> Command:
    """Return the command that runs `module` on every rank of an allocation."""
    ranks = len(allocation.nodes) * allocation.ranks_per_node
    options = [
        f"--nodes={len(allocation.nodes)}",
        f"--nodelist={','.join(allocation.nodes)}",
        f"--ntasks={ranks}",
        f"--ntasks-per-node={allocation.ranks_per_node}",
        "--distribution=block",
        "--overlap",  # this process may itself run in a step, as in `salloc`
        "--export=ALL",
        "--mpi=none",
        # The supervisor handles a failed rank, and gives the others a few seconds to report.
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


def lost_nodes(allocation: Allocation) -> list[str]:
    """Return the nodes that SLURM has marked as lost, or else those that fail to run a minimal step.

    SLURM notices a lost node after its SlurmdTimeout, usually five minutes; it then cancels the job, and none of its
    nodes starts a step. After a restart of slurmctld no node does for seconds, so silent nodes are asked twice.
    """
    listing = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(allocation.nodes)}", "--format=%N %T"]
    shown = subprocess.run(listing, capture_output=True, text=True).stdout
    states = [line.split() for line in shown.splitlines()]
    lost = [words[0] for words in states if len(words) == 2 and _LOST.search(words[1])]
    if lost:
        return list(dict.fromkeys(lost))  # a node is listed once per partition
    silent = _find_silent_nodes(allocation.nodes)
    if silent:
        time.sleep(RETRY_AFTER_S)
    return _find_silent_nodes(silent)


def is_requeued(job: int) -> bool:
    """Return whether SLURM may requeue the job: a batch job submitted with `--requeue`."""
    shown = subprocess.run(["scontrol", "show", "job", str(job)], capture_output=True, text=True).stdout
    return all(re.search(rf"\b{flag}=1\b", shown) for flag in ("Requeue", "BatchFlag"))


def _find_silent_nodes(nodes: Sequence[str]) -> list[str]:
    with ThreadPoolExecutor(max_workers=64) as pool:
        answers = list(pool.map(_is_responding, nodes))
    return [node for node, answered in zip(nodes, answers, strict=True) if not answered]


def _is_responding(node: str) -> bool:
    step = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--mpi=none", "--input=none", "true"]
    try:
        return subprocess.run(step, capture_output=True, timeout=NODE_TIMEOUT_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _host_names(node_list: str) -> list[str]:
    """Expand SLURM's short form of nodes, `gpu[003-006,9]`."""
    try:
        shown = subprocess.run(["scontrol", "show", "hostnames", node_list], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        problem = (
            f"scontrol cannot list its nodes ({reason}); run this on a host of the cluster, or use another launcher"
        )
        raise UserError(f"SLURM_JOB_NODELIST={node_list}: {problem}") from None
    return shown.stdout.split()
