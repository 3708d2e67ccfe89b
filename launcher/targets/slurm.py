"""Inside a SLURM allocation: which nodes and ranks it holds, and the `srun` command that starts one process per GPU.

srun starts the ranks themselves, not DeepSpeed's launcher once a node: it is ready sooner (measured in
docs/guide/several-machines.md), knows every rank's exit code, and passes SIGUSR1 on to all of them.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Unpack

from launcher.targets.hostfile import Filters, choose_slots
from launcher.targets.local import Command
from trainer.config import UserError
from trainer.contract.default_ranks import in_allocation, ranks_per_node
from trainer.contract.ports import port_of_job

NODE_TIMEOUT_S = 60.0
ASKED_AGAIN_S = 10.0
# "down*", "mixed*": the asterisk is SLURM's for a node that does not respond.
_LOST = re.compile(r"down|fail|\*$", re.I)


@dataclass(frozen=True)
class Allocation:
    """Nodes of a job, and how many ranks each of them gets."""

    job_id: int
    nodes: tuple[str, ...]
    ranks_per_node: int

    @property
    def port(self) -> int:
        """Where the ranks meet."""
        return port_of_job(self.job_id)


def read_allocation(env: Mapping[str, str], **filters: Unpack[Filters]) -> Allocation:
    """The allocation that this process is in, cut down by the options. Raises UserError outside of one."""
    if not in_allocation(env):
        raise UserError(
            "--launcher slurm: not inside a SLURM allocation; `zerolora submit CONFIG` makes one, or run this below "
            "`salloc` or in a batch script"
        )
    if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        raise UserError(
            f"--launcher slurm: srun has started this command {env['SLURM_STEP_NUM_TASKS']} times; start it once "
            "(it calls srun itself), or start `zerolora-rank CONFIG` with srun"
        )
    for option, text in (("--include", filters.get("include")), ("--exclude", filters.get("exclude"))):
        if text and ":" in text:
            raise UserError(f"{option} {text}: under SLURM whole nodes are chosen; use --num-gpus, or a smaller job")
    names = _host_names(env["SLURM_JOB_NODELIST"])
    most = ranks_per_node(env)
    # Where the job names no number a node takes as many ranks as the user wants.
    slots = {name: list(range(most or filters.get("num_gpus") or 1)) for name in names}
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
    """The command that runs `module` with `arguments` on every rank of an allocation."""
    ranks = len(allocation.nodes) * allocation.ranks_per_node
    options = [
        f"--nodes={len(allocation.nodes)}",
        f"--nodelist={','.join(allocation.nodes)}",
        f"--ntasks={ranks}",
        f"--ntasks-per-node={allocation.ranks_per_node}",
        "--distribution=block",
        "--overlap",  # this may itself run in a step, as below `salloc`
        "--export=ALL",
        "--mpi=none",
        # A rank that fails is looked into here, and the others get a few seconds for their last words.
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--unbuffered",
    ]
    if "SLURM_CPUS_PER_TASK" in os.environ:
        options.append(f"--cpus-per-task={os.environ['SLURM_CPUS_PER_TASK']}")  # srun has not inherited it since 22.05
    variables = {
        "MASTER_ADDR": address or allocation.nodes[0],
        "MASTER_PORT": str(port or allocation.port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or os.environ.get("SLURM_CPUS_PER_TASK", "1"),
    }
    argv = ["srun", *options, sys.executable, "-u", "-m", module, *arguments, f"--world-size={ranks}"]
    return Command(tuple(argv), ranks, variables, ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))


def lost_nodes(allocation: Allocation) -> list[str]:
    """Nodes that SLURM has given up, or else those that do not start the smallest of steps any more.

    SLURM notices after its SlurmdTimeout, five minutes as a rule; it then cancels the job, and none of its nodes starts
    a step. For seconds after slurmctld itself was started again no node does: who does not answer is asked twice.
    """
    listing = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(allocation.nodes)}", "--format=%N %T"]
    shown = subprocess.run(listing, capture_output=True, text=True).stdout
    states = [line.split() for line in shown.splitlines()]
    given_up = [words[0] for words in states if len(words) == 2 and _LOST.search(words[1])]
    if given_up:
        return list(dict.fromkeys(given_up))  # a node is listed once for each partition
    silent = _silent(allocation.nodes)
    if silent:
        time.sleep(ASKED_AGAIN_S)
    return _silent(silent)


def is_requeued(job: int) -> bool:
    """Whether SLURM may queue the job again, as `sbatch --requeue` lets it: never one without a batch script."""
    shown = _show_job(job)
    return all(re.search(rf"\b{flag}=1\b", shown) for flag in ("Requeue", "BatchFlag"))


def job_state(job: int) -> str:
    """RUNNING, NODE_FAIL...; empty if SLURM does not say."""
    found = re.search(r"\bJobState=(\w+)", _show_job(job))
    return found[1] if found else ""


def slurmd_timeout() -> str:
    """How long slurmctld waits for a node that does not answer, in its own words, `300 sec`."""
    shown = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True).stdout
    found = re.search(r"^SlurmdTimeout\s*=\s*(.+?)\s*$", shown, re.M)
    return found[1] if found else "300 sec as a rule"


def _show_job(job: int) -> str:
    return subprocess.run(["scontrol", "show", "job", str(job)], capture_output=True, text=True).stdout


def _silent(nodes: Sequence[str]) -> list[str]:
    with ThreadPoolExecutor(max_workers=64) as pool:
        answers = list(pool.map(_answers, nodes))
    return [node for node, answered in zip(nodes, answers, strict=True) if not answered]


def _answers(node: str) -> bool:
    step = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--mpi=none", "--input=none", "true"]
    try:
        return subprocess.run(step, capture_output=True, timeout=NODE_TIMEOUT_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _host_names(node_list: str) -> list[str]:
    """The nodes of SLURM's short form, `gpu[003-006,9]`."""
    try:
        shown = subprocess.run(["scontrol", "show", "hostnames", node_list], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"scontrol show hostnames {node_list}: {error}") from None
    return shown.stdout.split()
