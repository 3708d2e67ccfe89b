"""Choose which of a run's slots (GPUs or CPU ranks) to use when it restarts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from launcher.plan import CommandBuilder, LaunchPlan, LaunchRequest, plan_launch, plan_on_hosts, select_slots
from launcher.supervision.remote import SrunRanks
from launcher.supervision.terminal import log
from launcher.targets.hostfile import Slots, detect_unreachable_hosts
from launcher.targets.local import build_local_command
from launcher.targets.slurm import Allocation, build_srun_command, detect_lost_nodes
from trainer.config import UserError
from trainer.contract.default_ranks import CPU_RANKS, list_installed_gpus
from trainer.contract.rendezvous import find_free_port


@dataclass(frozen=True)
class RestartPlan:
    plan: LaunchPlan
    slots: tuple[int, ...]
    """Slot number of each rank."""
    available: int
    """Number of available slots; some stay idle if it does not divide the global batch size."""


class RestartPlanner:
    """Plans restarts on a run's slots, which are numbered by their rank in the first attempt."""

    def __init__(self, request: LaunchRequest, logs: Path, build: CommandBuilder) -> None:
        self._request, self._logs, self._launcher = request, logs, request.resolve_launcher()
        options = build.keywords
        self._numbers: list[int] = list(options.get("gpus", ()))[: request.num_gpus]
        # A GPU's index changes when another GPU fails; its identifier does not.
        identifiers = list_installed_gpus() if self._numbers else []
        self._gpus = [identifiers[number] for number in self._numbers]
        self._host_slots = _flatten(options.get("slots", {}))
        self._allocation: Allocation | None = options.get("allocation")

    def find_failure_domain(self, slot: int) -> tuple[str, frozenset[int]] | None:
        """Return the GPU, slot or node to exclude after `slot` failed, and the slots it covers; None under mpirun."""
        if self._launcher == "mpi":
            return None
        if self._allocation is not None:
            size = self._allocation.ranks_per_node
            node = slot // size  # srun starts the same number of ranks on each node
            return f"node {self._allocation.nodes[node]}", frozenset(range(node * size, (node + 1) * size))
        if self._launcher == "hostfile":
            host, gpu = self._host_slots[slot]
            return f"slot {gpu} of {host}", frozenset({slot})
        name = f"GPU {self._numbers[slot]}" if self._numbers else f"the slot of rank {slot}"
        return name, frozenset({slot})

    def plan_restart(self, excluded: frozenset[int], global_batch_size: int | None) -> RestartPlan:
        """Plan a restart on as many available slots as divide `global_batch_size`, or on all if it is None.

        Skips slots in `excluded` and prints lost hosts and GPUs. Raises UserError if no slot is available.
        """
        if self._launcher == "local":
            return self._plan_local(excluded, global_batch_size)
        if self._launcher == "hostfile":
            # A run that is not elastic may use hosts added to the file since it started.
            host_slots = self._host_slots if global_batch_size is not None else _flatten(select_slots(self._request))
            return self._plan_hosts(host_slots, excluded, global_batch_size)
        if self._allocation is not None:
            return self._plan_nodes(self._allocation, excluded, global_batch_size)
        unchanged = plan_launch(self._request, self._logs)
        ranks = unchanged[0]([]).ranks
        return RestartPlan(unchanged, tuple(range(ranks)), ranks)

    def _plan_local(self, excluded: frozenset[int], total: int | None) -> RestartPlan:
        current = {identifier: number for number, identifier in enumerate(list_installed_gpus())} if self._gpus else {}
        all_slots = range(len(self._gpus) or self._request.num_gpus or CPU_RANKS)
        usable = [slot for slot in all_slots if not self._gpus or self._gpus[slot] in current]
        if missing := [str(self._numbers[slot]) for slot in all_slots if slot not in usable]:
            log(f"the driver no longer lists GPU {', '.join(missing)}")
        available = [slot for slot in usable if slot not in excluded]
        slots = tuple(available[: find_largest_divisor(range(1, len(available) + 1), total)])
        if not slots:
            raise UserError("no GPU of this machine is available; check them with nvidia-smi")
        port = self._request.master_port or find_free_port()
        chosen = [current[self._gpus[slot]] for slot in slots] if self._gpus else []
        build = partial(build_local_command, gpus=chosen, num_gpus=len(slots), port=port)
        return RestartPlan((build, None), slots, len(available))

    def _plan_hosts(
        self, host_slots: Sequence[tuple[str, int]], excluded: frozenset[int], total: int | None
    ) -> RestartPlan:
        hosts = list(dict.fromkeys(host for host, _ in host_slots))
        if missing := detect_unreachable_hosts(hosts, Path.cwd()):
            log(f"not reachable by ssh: {', '.join(missing)}")
        available = [slot for slot, (host, _) in enumerate(host_slots) if slot not in excluded and host not in missing]
        available = available[: len(self._host_slots)]
        slots = tuple(available[: find_largest_divisor(range(1, len(available) + 1), total)])
        if not slots:
            raise UserError(f"--hostfile {self._request.hostfile}: no slot is available on a reachable host; add hosts")
        chosen: Slots = {}
        for slot in slots:
            host, gpu = host_slots[slot]
            chosen.setdefault(host, []).append(gpu)
        address = self._request.master_addr if host_slots[0][0] in chosen else None
        return RestartPlan(plan_on_hosts(self._request, self._logs, chosen, address), slots, len(available))

    def _plan_nodes(self, allocation: Allocation, excluded: frozenset[int], total: int | None) -> RestartPlan:
        """Choose the nodes and ranks per node that give the most ranks; srun needs the same number on every node."""
        lost, size = detect_lost_nodes(allocation), allocation.ranks_per_node
        if lost:
            log(f"lost nodes: {', '.join(lost)}")
        nodes = [
            number
            for number, name in enumerate(allocation.nodes)
            if name not in lost and not excluded & set(range(number * size, (number + 1) * size))
        ]
        if not nodes:
            raise UserError(f"SLURM job {allocation.job_id}: none of its nodes is available; submit the job again")
        # If layouts have the same number of ranks, the dict keeps the last one, which uses the fewest nodes.
        layouts = {count * ranks: (count, ranks) for count in range(len(nodes), 0, -1) for ranks in range(1, size + 1)}
        count, ranks = layouts[find_largest_divisor(layouts, total)]
        reduced = replace(
            allocation, nodes=tuple(allocation.nodes[node] for node in nodes[:count]), ranks_per_node=ranks
        )
        address = self._request.master_addr if 0 in nodes[:count] else None
        build = partial(build_srun_command, allocation=reduced, address=address, port=self._request.master_port)
        slots = tuple(node * size + rank for node in nodes[:count] for rank in range(ranks))
        return RestartPlan((build, SrunRanks(reduced)), slots, len(nodes) * size)


def _flatten(slots: Mapping[str, Sequence[int]]) -> list[tuple[str, int]]:
    return [(host, gpu) for host, gpus in slots.items() for gpu in gpus]


def find_largest_divisor(numbers: Iterable[int], total: int | None) -> int:
    """Return the largest of `numbers` that divides `total`, or 0 if none does; if `total` is None, the largest one."""
    return max((number for number in numbers if total is None or total % number == 0), default=0)
