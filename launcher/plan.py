"""Choose the launcher for a run's ranks, and build the command that starts them."""

import os
import re
import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from launcher.supervision.remote import RemoteRanks, SrunRanks, SshRanks
from launcher.supervision.terminal import log, print_progress
from launcher.targets.hostfile import Slots, check_reachable, filter_slots, read_hostfile
from launcher.targets.local import Command, build_hostfile_command, build_local_command
from launcher.targets.mpi import build_mpirun_command
from launcher.targets.slurm import build_srun_command, read_allocation
from trainer.config import UserError
from trainer.config.command_line import MAX_RANKS
from trainer.contract.default_ranks import CPU_RANKS, is_in_allocation, list_visible_gpus
from trainer.contract.rendezvous import choose_random_port, describe_port_problem, find_free_port, format_port_error

ENVIRONMENT_FILE = "environment"
CPU_RANK_VARIABLES = {"OMP_NUM_THREADS": "1"}
CommandBuilder = partial[Command]
"""Function that builds the command to start all ranks from the ranks' arguments and, optionally, their `module`."""
LaunchPlan = tuple[CommandBuilder, RemoteRanks | None]
"""Command builder, and the object that signals the ranks; None if they are children of this process."""
LAUNCHERS = ("auto", "local", "hostfile", "slurm", "mpi")


@dataclass(frozen=True)
class LaunchRequest:
    """Command-line options that choose where to run."""

    launcher: str = "auto"
    hostfile: Path | None = None
    include: str | None = None
    exclude: str | None = None
    num_nodes: int | None = None
    num_gpus: int | None = None
    master_addr: str | None = None
    master_port: int | None = None

    def get_filters(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("include", "exclude", "num_nodes", "num_gpus")}

    def resolve_launcher(self) -> str:
        """Return the launcher that `auto` stands for. Raises UserError for contradictory options."""
        if self.num_gpus is not None and not 1 <= self.num_gpus <= MAX_RANKS:
            raise UserError(f"--num-gpus {self.num_gpus}: must be 1 to {MAX_RANKS}; omit it to use all")
        if self.launcher not in LAUNCHERS:
            raise UserError(f"--launcher {self.launcher}: must be one of {', '.join(LAUNCHERS)}")
        default = "hostfile" if self.hostfile is not None else "slurm" if is_in_allocation(os.environ) else "local"
        chosen = default if self.launcher == "auto" else self.launcher
        if chosen == "hostfile" and self.hostfile is None:
            raise UserError("--launcher hostfile: needs --hostfile FILE, with one line per host, `gpu-a slots=8`")
        if self.hostfile is not None and chosen not in ("hostfile", "mpi"):
            raise UserError(f"--hostfile {self.hostfile}: {chosen} takes no hostfile; use --launcher hostfile or mpi")
        if self.master_addr is not None and not re.fullmatch(r"\w[\w.:-]*", self.master_addr):
            raise UserError(f"--master-addr {self.master_addr}: must be a host name or address")
        if self.master_port is not None and not 1 <= self.master_port <= 65535:
            raise UserError(f"--master-port {self.master_port}: must be 1 to 65535")
        if chosen == "local":
            self._check_local()
        return chosen

    def _check_local(self) -> None:
        if self.num_nodes not in (None, 1):
            raise UserError(f"--num-nodes {self.num_nodes}: a local run uses only this machine; add --hostfile FILE")
        for option, value in (("--include", self.include), ("--exclude", self.exclude)):
            if value is not None:
                raise UserError(f"{option} {value}: needs --hostfile; to choose GPUs here, set CUDA_VISIBLE_DEVICES")
        if self.master_addr not in (None, "localhost", "127.0.0.1"):
            raise UserError(f"--master-addr {self.master_addr}: a local run uses only this machine; remove the option")


def plan_launch(request: LaunchRequest, logs: Path) -> LaunchPlan:
    """Plan how to start and signal the ranks. Raises UserError for invalid options."""
    launcher = request.resolve_launcher()
    address, port = request.master_addr, request.master_port
    if launcher == "local":
        if port is None:
            port = find_free_port()
        elif reason := describe_port_problem(port):
            raise UserError(format_port_error(port, reason))
        return partial(build_local_command, gpus=list_visible_gpus(), num_gpus=request.num_gpus, port=port), None
    if launcher == "slurm":
        allocation = read_allocation(os.environ, **request.get_filters())
        return partial(build_srun_command, allocation=allocation, address=address, port=port), SrunRanks(allocation)
    slots = select_slots(request)
    if launcher == "mpi":
        if address is not None and port is None:
            port = choose_random_port()
        return partial(build_mpirun_command, slots=slots, address=address, port=port), RemoteRanks()
    print_progress(f"connecting to the hosts of {request.hostfile}")  # takes as long as the slowest login
    check_reachable(list(slots), Path.cwd())
    return plan_on_hosts(request, logs, slots, address)


def plan_on_hosts(request: LaunchRequest, logs: Path, slots: Slots, address: str | None) -> LaunchPlan:
    """Plan a run on `slots` of a hostfile; `address` is the rendezvous address, by default the first host's."""
    assert request.hostfile is not None
    build = partial(
        build_hostfile_command,
        hostfile=request.hostfile,
        slots=slots,
        address=address or _find_reachable_name(next(iter(slots))),
        port=request.master_port or choose_random_port(),
        environment_file=logs / ENVIRONMENT_FILE,
    )
    return build, SshRanks(slots)


def select_slots(request: LaunchRequest) -> Slots:
    if request.hostfile is not None:
        slots = read_hostfile(request.hostfile)
    else:
        gpus = list_visible_gpus() or list(range(request.num_gpus or CPU_RANKS))
        slots = {"localhost": list(range(len(gpus)))}
    return filter_slots(slots, **request.get_filters())


def _find_reachable_name(host: str) -> str | None:
    """Return the host's name; None if it does not resolve, or is a loopback address on this machine.

    Given None, DeepSpeed uses the first address from `hostname -I` on that host.
    """
    name = host.rpartition("@")[2]
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except socket.gaierror:
        return None  # a name from ~/.ssh/config
    if any(address.startswith("127.") or address == "::1" for address in addresses):
        log(f"note: {name} resolves to a loopback address here; other hosts use the first address in `hostname -I`")
        return None
    return name
