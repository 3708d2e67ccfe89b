"""The places of a run's first start, in the order of its ranks, and which of them take part after a failure."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from launcher.plan import Plan, Request, plan, slots_of
from launcher.supervision.remote import ThroughSrun
from launcher.supervision.terminal import say
from launcher.targets.hostfile import reachable
from launcher.targets.local import CPU_RANKS, local_command, visible_gpus
from launcher.targets.slurm import Allocation, lost_nodes, read_allocation, srun_command
from trainer.config import UserError
from trainer.contract.ports import free_port


@dataclass(frozen=True)
class Again:
    """A start after a failure."""

    plan: Plan
    places: tuple[int, ...]
    """Of the first start, one for each rank."""
    idle: int = 0
    """Places that are there, and would not divide the global batch."""


class Places:
    """GPUs or CPU ranks of this machine, slots of a hostfile's hosts, or those of a SLURM job's nodes."""

    def __init__(self, request: Request, logs: Path) -> None:
        self._request, self._logs = request, logs
        self._launcher = request.chosen_launcher()
        self._gpus = visible_gpus() if self._launcher == "local" else []
        self._number = request.num_gpus or len(self._gpus) or CPU_RANKS
        self._slots = [(host, gpu) for host, gpus in slots_of(request).items() for gpu in gpus] if self._hosts else []
        self._allocation = read_allocation(os.environ, **request.filters()) if self._launcher == "slurm" else None

    @property
    def _hosts(self) -> bool:
        return self._launcher == "hostfile"

    def unit(self, place: int) -> tuple[str, frozenset[int]] | None:
        """What can be left out with a place: its name, and all places that go with it. None under mpirun."""
        if self._launcher == "mpi":
            return None
        if self._allocation is not None:
            size = self._allocation.ranks_per_node
            node = place // size  # srun starts as many ranks on each node
            return f"node {self._allocation.nodes[node]}", frozenset(range(node * size, (node + 1) * size))
        if self._hosts:
            host, gpu = self._slots[place]
            return f"slot {gpu} of {host}", frozenset({place})
        name = f"GPU {self._gpus[place]}" if self._gpus else f"the place of rank {place}"
        return name, frozenset({place})

    def again(self, left_out: frozenset[int], total: int | None) -> Again:
        """What is there now without `left_out`: of it the most ranks that divide `total`, all of them if that is None.

        Says which hosts or nodes are gone. Raises UserError if nothing is left.
        """
        if self._launcher == "local":
            return self._on_this_machine(left_out, total)
        if self._hosts:
            return self._on_hosts(left_out, total)
        if self._allocation is not None:
            return self._on_nodes(self._allocation, left_out, total)
        planned = plan(self._request, self._logs)
        return Again(planned, tuple(range(planned[0]([]).ranks)))

    def _on_this_machine(self, left_out: frozenset[int], total: int | None) -> Again:
        gpus, port = visible_gpus(), self._request.master_port or free_port()
        number = min(self._number, len(gpus)) if self._gpus else self._number
        there = [place for place in range(number) if place not in left_out]
        places = there[: most_that_divide(range(1, len(there) + 1), total)]
        if not places:
            raise UserError("no GPU of this machine is left")
        chosen = [gpus[place] for place in places] if gpus else []
        build = partial(local_command, gpus=chosen, num_gpus=len(places), port=port)
        return Again((build, None), tuple(places), len(there) - len(places))

    def _on_hosts(self, left_out: frozenset[int], total: int | None) -> Again:
        hosts = list(dict.fromkeys(host for host, _ in self._slots))
        answering = reachable(hosts, Path.cwd())
        if not answering:
            raise UserError(f"--hostfile {self._request.hostfile}: none of its hosts can be reached")
        if gone := [host for host in hosts if host not in answering]:
            say(f"not reached by ssh: {', '.join(gone)}")
        there = [place for place, (host, _) in enumerate(self._slots) if place not in left_out and host in answering]
        places = there[: most_that_divide(range(1, len(there) + 1), total)]
        if not places:
            raise UserError(f"--hostfile {self._request.hostfile}: no slot is left of hosts that can be reached")
        words = "@".join(
            f"{host}:{','.join(str(self._slots[place][1]) for place in places if self._slots[place][0] == host)}"
            for host in dict.fromkeys(self._slots[place][0] for place in places)
        )
        kept = replace(self._request, include=words, exclude=None, num_nodes=None, num_gpus=None)
        return Again(plan(kept, self._logs), tuple(places), len(there) - len(places))

    def _on_nodes(self, allocation: Allocation, left_out: frozenset[int], total: int | None) -> Again:
        """Whole nodes with as many ranks each, as srun starts them: of these rectangles the one with the most ranks."""
        lost, size = lost_nodes(allocation), allocation.ranks_per_node
        if lost:
            say(f"lost nodes: {', '.join(lost)}")
        nodes = [
            number
            for number, name in enumerate(allocation.nodes)
            if name not in lost and not left_out & set(range(number * size, (number + 1) * size))
        ]
        if not nodes:
            raise UserError(f"SLURM job {allocation.job_id}: none of its nodes is left")
        shapes = {count * ranks: (count, ranks) for count in range(1, len(nodes) + 1) for ranks in range(1, size + 1)}
        count, ranks = shapes[most_that_divide(shapes, total)]
        kept = replace(allocation, nodes=tuple(allocation.nodes[node] for node in nodes[:count]), ranks_per_node=ranks)
        address, port = self._request.master_addr, self._request.master_port
        build = partial(srun_command, allocation=kept, address=address, port=port)
        places = tuple(node * size + rank for node in nodes[:count] for rank in range(ranks))
        return Again((build, ThroughSrun(kept)), places, len(nodes) * size - len(places))


def most_that_divide(numbers: Iterable[int], total: int | None) -> int:
    """The largest of the numbers that divides `total`, or of all if that is None; 0 if there is none."""
    return max((number for number in numbers if total is None or total % number == 0), default=0)
