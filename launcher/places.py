"""The places of a run's first start, in the order of its ranks, and which of them take part after a failure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from launcher.plan import Build, Plan, Request, on_hosts, plan, slots_of
from launcher.supervision.remote import ThroughSrun
from launcher.supervision.terminal import say
from launcher.targets.hostfile import Slots, reachable
from launcher.targets.local import local_command
from launcher.targets.slurm import Allocation, lost_nodes, srun_command
from trainer.config import UserError
from trainer.contract.default_ranks import CPU_RANKS, installed_gpus
from trainer.contract.ports import free_port


@dataclass(frozen=True)
class Again:
    """A start after a failure."""

    plan: Plan
    places: tuple[int, ...]
    """Of the first start, one for each rank."""
    idle: tuple[int, ...] = ()
    """Those that are there, and with which the ranks would not divide the global batch."""


class Places:
    """GPUs or CPU ranks of this machine, slots of a hostfile's hosts, or those of a SLURM job's nodes."""

    def __init__(self, request: Request, logs: Path, build: Build) -> None:
        """`build` is the first start's, which says where that is."""
        self._request, self._logs, self._launcher = request, logs, request.chosen_launcher()
        found = build.keywords
        self._numbers: list[int] = list(found.get("gpus", ()))[: request.num_gpus]
        # Numbers change where a GPU is gone; what does not is its own name.
        identifiers = installed_gpus() if self._numbers else []
        self._gpus = [identifiers[number] for number in self._numbers]
        self._slots = _flat(found.get("slots", {}))
        self._allocation: Allocation | None = found.get("allocation")

    def unit(self, place: int) -> tuple[str, frozenset[int]] | None:
        """What can be left out with a place: its name, and all places that go with it. None under mpirun."""
        if self._launcher == "mpi":
            return None
        if self._allocation is not None:
            size = self._allocation.ranks_per_node
            node = place // size  # srun starts as many ranks on each node
            return f"node {self._allocation.nodes[node]}", frozenset(range(node * size, (node + 1) * size))
        if self._launcher == "hostfile":
            host, gpu = self._slots[place]
            return f"slot {gpu} of {host}", frozenset({place})
        name = f"GPU {self._numbers[place]}" if self._numbers else f"the place of rank {place}"
        return name, frozenset({place})

    def names(self, places: Collection[int]) -> str:
        """Places by their names, those that go together by one: "slot 2 of b", "2 of the ranks of node n4"."""
        units = dict(unit for place in places if (unit := self.unit(place)) is not None)
        return ", ".join(
            name if with_it <= set(places) else f"{len(with_it & set(places))} of the ranks of {name}"
            for name, with_it in units.items()
        )

    def again(self, left_out: frozenset[int], total: int | None) -> Again:
        """What is there now without `left_out`: of it the most ranks that divide `total`, all of them if that is None.

        Says what is gone. Raises UserError if nothing is left.
        """
        if self._launcher == "local":
            return self._on_this_machine(left_out, total)
        if self._launcher == "hostfile":
            # A run that takes as many as at first may find another host in the file.
            slots = self._slots if total is not None else _flat(slots_of(self._request))
            return self._on_hosts(slots, left_out, total)
        if self._allocation is not None:
            return self._on_nodes(self._allocation, left_out, total)
        planned = plan(self._request, self._logs)
        return Again(planned, tuple(range(planned[0]([]).ranks)))

    def _on_this_machine(self, left_out: frozenset[int], total: int | None) -> Again:
        now = {identifier: number for number, identifier in enumerate(installed_gpus())} if self._gpus else {}
        every = range(len(self._gpus) or self._request.num_gpus or CPU_RANKS)
        if gone := [str(self._numbers[place]) for place in every if self._gpus and self._gpus[place] not in now]:
            say(f"the driver no longer shows GPU {', '.join(gone)}")
        there = [place for place in every if place not in left_out and (not self._gpus or self._gpus[place] in now)]
        places, idle = _most_places(there, total)
        if not places:
            raise UserError("no GPU of this machine is left")
        port = self._request.master_port or free_port()
        chosen = [now[self._gpus[place]] for place in places] if self._gpus else []
        build = partial(local_command, gpus=chosen, num_gpus=len(places), port=port)
        return Again((build, None), places, idle)

    def _on_hosts(self, slots: Sequence[tuple[str, int]], left_out: frozenset[int], total: int | None) -> Again:
        hosts = list(dict.fromkeys(host for host, _ in slots))
        answering = reachable(hosts, Path.cwd())
        if gone := [host for host in hosts if host not in answering]:
            say(f"not reached by ssh: {', '.join(gone)}")
        there = [place for place, (host, _) in enumerate(slots) if place not in left_out and host in answering]
        places, idle = _most_places(there[: len(self._slots)], total)
        if not places:
            raise UserError(f"--hostfile {self._request.hostfile}: no slot is left of hosts that can be reached")
        kept: Slots = {}
        for place in places:
            host, gpu = slots[place]
            kept.setdefault(host, []).append(gpu)
        address = self._request.master_addr if slots[0][0] in kept else None
        return Again(on_hosts(self._request, self._logs, kept, address), places, idle)

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
        # Of two with as many ranks the one on fewer nodes.
        shapes = {count * ranks: (count, ranks) for count in range(len(nodes), 0, -1) for ranks in range(1, size + 1)}
        count, ranks = shapes[most_that_divide(shapes, total)]
        kept = replace(allocation, nodes=tuple(allocation.nodes[node] for node in nodes[:count]), ranks_per_node=ranks)
        address = self._request.master_addr if 0 in nodes[:count] else None
        port = self._request.master_port
        build = partial(srun_command, allocation=kept, address=address, port=port)
        places = tuple(node * size + rank for node in nodes[:count] for rank in range(ranks))
        there = (place for node in nodes for place in range(node * size, (node + 1) * size))
        return Again((build, ThroughSrun(kept)), places, tuple(place for place in there if place not in places))


def _flat(slots: Mapping[str, Sequence[int]]) -> list[tuple[str, int]]:
    return [(host, gpu) for host, gpus in slots.items() for gpu in gpus]


def _most_places(there: Sequence[int], total: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first of them, as many as divide `total`, and the rest."""
    most = most_that_divide(range(1, len(there) + 1), total)
    return tuple(there[:most]), tuple(there[most:])


def most_that_divide(numbers: Iterable[int], total: int | None) -> int:
    """The largest of the numbers that divides `total`, or of all if that is None; 0 if there is none."""
    return max((number for number in numbers if total is None or total % number == 0), default=0)
