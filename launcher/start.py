"""`zerolora train`: which launcher, its command, the checks before it, and the run under supervision."""

import os
import re
import socket
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from launcher.attempts import ENVIRONMENT_FILE, Attempts, Plan
from launcher.job_starts import note_end, note_start
from launcher.supervision.child import run_child
from launcher.supervision.held_ranks import FAILED, HeldRanks
from launcher.supervision.remote import ThroughLauncher, ThroughSrun, ThroughSsh
from launcher.supervision.terminal import say, show
from launcher.targets.hostfile import Filters, Slots, check_reachable, choose_slots, reachable, read_hostfile
from launcher.targets.local import CPU_RANKS, hostfile_command, local_command, visible_gpus
from launcher.targets.mpi import mpirun_command
from launcher.targets.slurm import in_allocation, lost_nodes, read_allocation, srun_command
from trainer.config import LoadedConfig, UserError
from trainer.contract.command_typed import as_argument
from trainer.contract.folder_lock import FolderLock, refuse_if_held
from trainer.contract.launcher_process import tie_children_to_this_process
from trainer.contract.ports import check_free, free_port, random_port

LAUNCHERS = ("auto", "local", "hostfile", "slurm", "mpi")


@dataclass(frozen=True)
class Request:
    """What the command line says about where to run."""

    launcher: str = "auto"
    hostfile: Path | None = None
    include: str | None = None
    exclude: str | None = None
    num_nodes: int | None = None
    num_gpus: int | None = None
    master_addr: str | None = None
    master_port: int | None = None

    def filters(self) -> Filters:
        """What cuts the hosts down."""
        return Filters(include=self.include, exclude=self.exclude, num_nodes=self.num_nodes, num_gpus=self.num_gpus)

    def chosen_launcher(self) -> str:
        """The launcher that `auto` stands for: srun in an allocation, pdsh with a hostfile, else this machine.

        Raises UserError for options that contradict each other.
        """
        if self.launcher not in LAUNCHERS:
            raise UserError(f"--launcher {self.launcher}: must be one of {', '.join(LAUNCHERS)}")
        if self.launcher != "auto":
            chosen = self.launcher
        elif self.hostfile is not None:
            chosen = "hostfile"
        else:
            chosen = "slurm" if in_allocation(os.environ) else "local"
        if chosen == "hostfile" and self.hostfile is None:
            raise UserError("--launcher hostfile: which? --hostfile FILE, a line for each host, `gpu-a slots=8`")
        if self.hostfile is not None and chosen not in ("hostfile", "mpi"):
            raise UserError(f"--hostfile {self.hostfile}: --launcher {chosen} takes none; use hostfile or mpi")
        if self.master_addr is not None and not re.fullmatch(r"\w[\w.:-]*", self.master_addr):
            raise UserError(f"--master-addr {self.master_addr}: must be a host's name or address")
        if self.master_port is not None and not 1 <= self.master_port <= 65535:
            raise UserError(f"--master-port {self.master_port}: must be 1 to 65535")
        if chosen == "local":
            self._check_local()
        return chosen

    def _check_local(self) -> None:
        if self.num_nodes not in (None, 1):
            raise UserError(f"--num-nodes {self.num_nodes}: this is one machine; name others with --hostfile FILE")
        for option, value in (("--include", self.include), ("--exclude", self.exclude)):
            if value is not None:
                raise UserError(f"{option} {value}: needs --hostfile; on one machine set CUDA_VISIBLE_DEVICES")
        if self.master_addr not in (None, "localhost", "127.0.0.1"):
            raise UserError(f"--master-addr {self.master_addr}: this is one machine; name others with --hostfile FILE")


def replan(request: Request, logs: Path, left_out: frozenset[int], ranks: int | None) -> Plan:
    """As `plan`, after a failure, without the places `left_out`, on at most so many ranks; UserError if none is left.

    Places are the GPUs or CPU ranks of this machine; of a hostfile hosts that cannot be reached are left out.
    """
    launcher = request.chosen_launcher()
    if launcher == "local":
        gpus, port = visible_gpus(), request.master_port or free_port()
        count = request.num_gpus or len(gpus) or CPU_RANKS
        gpus = [gpu for place, gpu in enumerate(gpus[:count]) if place not in left_out]
        number = min(len(gpus) or count - len(left_out), ranks or count)
        return partial(local_command, gpus=gpus, num_gpus=number, port=port), None
    if launcher == "hostfile" and request.hostfile is not None:
        slots = _slots(request)
        hosts = reachable(list(slots), Path.cwd())
        if not hosts:
            raise UserError(f"--hostfile {request.hostfile}: none of its hosts can be reached")
        words = "@".join(f"{host}:{','.join(map(str, slots[host]))}" for host in hosts)
        kept = replace(request, include=words, exclude=None, num_nodes=None, num_gpus=None)
        return plan(replace(kept, num_nodes=max(1, ranks // len(slots[hosts[0]]))) if ranks else kept, logs)
    if launcher == "slurm" and (lost := lost_nodes(read_allocation(os.environ, **request.filters()))):
        request = replace(request, exclude="@".join(lost))
    return plan(request, logs)


def plan(request: Request, logs: Path) -> Plan:
    """How to build the command, and the way to its ranks (None: they are below this process). Raises UserError."""
    launcher = request.chosen_launcher()
    address, port = request.master_addr, request.master_port
    if launcher == "local":
        if port is None:
            port = free_port()
        else:
            check_free(port)
        return partial(local_command, gpus=visible_gpus(), num_gpus=request.num_gpus, port=port), None
    if launcher == "slurm":
        allocation = read_allocation(os.environ, **request.filters())
        return partial(srun_command, allocation=allocation, address=address, port=port), ThroughSrun(allocation)
    slots = _slots(request)
    if launcher == "mpi":
        if address is not None and port is None:
            port = random_port()
        return partial(mpirun_command, slots=slots, address=address, port=port), ThroughLauncher()
    check_reachable(list(slots), Path.cwd())
    assert request.hostfile is not None
    build = partial(
        hostfile_command,
        hostfile=request.hostfile,
        slots=slots,
        address=address or _address_of(next(iter(slots))),
        port=port or random_port(),
        environment_file=logs / ENVIRONMENT_FILE,
    )
    return build, ThroughSsh(slots)


def start(
    arguments: Sequence[str],
    loaded: LoadedConfig,
    request: Request,
    *,
    dry_run: bool,
    goes_on: bool = False,
    profiled: bool = False,
) -> int:
    """Check, tokenise, start the ranks and stay with them; returns the exit code.

    `goes_on`: as one of the starts of a SLURM job, which are noted. `profiled`: the first rank says where the time to
    its first step went.
    """
    run_dir = Path(loaded.config.output_dir)
    logs = run_dir / "logs"
    if not dry_run:
        tie_children_to_this_process()
    build, reach = plan(request, logs)
    command = build(list(arguments))  # its refusals come before any work
    if dry_run:
        print(command.shell())
        say("note: model and data were not looked at; `zerolora validate` does that")
        return 0
    resumes = loaded.config.training.resume_from_checkpoint == "auto"
    refuse_if_held(run_dir, resumes=resumes)
    show(f"zerolora {own_version()}: {arguments[0]}")
    with HeldRanks.start(command) if reach is None else nullcontext() as held:
        hang_timeout = loaded.config.training.hang_timeout
        code = held.until_checked(hang_timeout) if held is not None else _check(arguments, command.ranks)
        if code:
            return code
        with FolderLock.take(run_dir, resumes=resumes, say=say) as lock:
            if goes_on:
                note_start(run_dir, os.environ)
            words = [*arguments, "--lock", lock.token, as_argument(sys.argv), *["--profile-start"] * profiled]
            code = Attempts(words, loaded, (build, reach), partial(replan, request, logs), held).train()
            if goes_on and lock.is_held:
                note_end(run_dir, os.environ, code)
            return code


def _check(arguments: Sequence[str], ranks: int) -> int:
    """Check and tokenise here for ranks elsewhere; the exit code."""
    # Of what it finds it shows only how far it is: rank 0 says the rest later.
    prepare = ["trainer.commands.prepare_run", "--phases", *arguments, f"--world-size={ranks}"]
    return run_child([sys.executable, "-m", "launcher.module", *prepare], FAILED)


def own_version() -> str:
    """As it was installed."""
    try:
        return version("zerolora")
    except PackageNotFoundError:  # a checkout, as on a shared file system
        return "(not installed)"


def _slots(request: Request) -> Slots:
    """Hosts and GPUs of a hostfile, or of this machine."""
    if request.hostfile is not None:
        slots = read_hostfile(request.hostfile)
    else:
        gpus = visible_gpus() or list(range(request.num_gpus or CPU_RANKS))
        slots = {"localhost": list(range(len(gpus)))}
    return choose_slots(slots, **request.filters())


def _address_of(host: str) -> str | None:
    """The host's name where it is one that other hosts can look up, too; else DeepSpeed asks it for its address."""
    name = host.rpartition("@")[2]
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except socket.gaierror:
        return None  # a name of ~/.ssh/config
    if any(address.startswith("127.") or address == "::1" for address in found):
        say(f"note: {name} is a loopback address here; the other hosts get what `hostname -I` on it begins with")
        return None
    return name
