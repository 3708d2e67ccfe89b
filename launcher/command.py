"""From a machine and a configuration to the `deepspeed` command line that starts one process per GPU."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config import UserError

CPU_RANKS = 2
# Where DeepSpeed looks for a hostfile of its own accord: some images have one, and "this machine" would become many.
IMPLICIT_HOSTFILE = Path("/job/hostfile")
# Left over from an outer job, these would make every process below us look like a rank.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Command:
    """A command line, what it changes in the environment, and how many ranks it starts on this machine."""

    argv: tuple[str, ...]
    ranks: int
    set_variables: Mapping[str, str]
    unset_variables: tuple[str, ...]

    def shell(self) -> str:
        """One line that does the same when pasted into a shell."""
        unset = [f"-u{name}" for name in self.unset_variables if name in os.environ]
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.set_variables.items()]
        return " ".join((["env", *unset] if unset else []) + [*variables, shlex.join(self.argv)])

    def environment(self) -> dict[str, str]:
        """This process's environment with the changes made."""
        kept = {name: value for name, value in os.environ.items() if name not in self.unset_variables}
        return kept | dict(self.set_variables)


def local_command(
    arguments: Sequence[str], *, gpus: Sequence[int], num_gpus: int | None, port: int, module: str = "trainer.train"
) -> Command:
    """The command that runs `module` with `arguments` on this machine: a rank per GPU, or CPU ranks if `gpus` is empty.

    `gpus` are the numbers of the GPUs that may be used; `num_gpus` takes the first so many of them, or that many CPU
    ranks. Raises UserError if `num_gpus` is more than there are.
    """
    if num_gpus is not None and num_gpus < 1:
        raise UserError(f"--num-gpus {num_gpus}: must be 1 or more")
    if gpus and num_gpus is not None and num_gpus > len(gpus):
        raise UserError(f"--num-gpus {num_gpus}: this machine offers {len(gpus)}; leave it out to use all")
    argv = [_deepspeed_executable()]
    if IMPLICIT_HOSTFILE.is_file():
        argv.append("--hostfile=/dev/null")
    if gpus:
        # Not `--num_gpus`: with that one DeepSpeed takes GPUs 0 to N-1, whatever CUDA_VISIBLE_DEVICES says.
        chosen = list(gpus)[:num_gpus]
        argv.append("--include=localhost:" + ",".join(str(gpu) for gpu in chosen))
        set_variables: dict[str, str] = {}
    else:
        # DeepSpeed's CPU "devices" are the memory nodes, one on most machines; only this option starts more ranks.
        chosen = list(range(num_gpus or CPU_RANKS))
        argv.append(f"--num_gpus={len(chosen)}")
        set_variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    argv += [f"--master_port={port}", "--module", module, *arguments]
    # CUDA_VISIBLE_DEVICES is unset because `--include` counts the GPUs of the machine, and DeepSpeed sets it per rank.
    return Command(tuple(argv), len(chosen), set_variables, (*RANK_VARIABLES, "CUDA_VISIBLE_DEVICES"))


def hostfile_command(
    arguments: Sequence[str],
    *,
    hostfile: Path,
    slots: Mapping[str, Sequence[int]],
    address: str | None,
    port: int,
    environment_file: Path,
    module: str = "trainer.train",
) -> Command:
    """The command that runs `module` with `arguments` on every slot of every host, by DeepSpeed's launcher over pdsh.

    `environment_file` holds the variables that ranks elsewhere get. Raises UserError without pdsh.
    """
    if shutil.which("pdsh") is None:
        raise UserError("--launcher hostfile: no pdsh here; install it (apt install pdsh), or use mpi or slurm")
    ranks = sum(len(gpus) for gpus in slots.values())
    argv = [_deepspeed_executable(), f"--hostfile={hostfile}"]
    argv.append("--include=" + "@".join(f"{host}:{','.join(map(str, gpus))}" for host, gpus in slots.items()))
    # With one host in the file DeepSpeed would start the ranks here, whichever host that is.
    argv += ["--force_multi", "--launcher=pdsh", f"--master_port={port}"]
    argv += [f"--master_addr={address}"] if address else []
    argv += ["--module", module, *arguments, f"--world-size={ranks}"]
    variables = {"DS_ENV_FILE": str(environment_file.absolute())}
    return Command(tuple(argv), ranks, variables, (*RANK_VARIABLES, "CUDA_VISIBLE_DEVICES"))


def visible_gpus() -> list[int]:
    """Numbers of this machine's NVIDIA GPUs that CUDA_VISIBLE_DEVICES allows, found without importing torch.

    Raises UserError for a CUDA_VISIBLE_DEVICES that names what is not there.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return []
    identifiers = _installed_gpus()
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not identifiers or allowed is None:
        return list(range(len(identifiers)))
    return select_gpus(identifiers, allowed)


def select_gpus(identifiers: Sequence[str], allowed: str) -> list[int]:
    """Positions in `identifiers` (UUIDs in the driver's order) that a CUDA_VISIBLE_DEVICES value names.

    CUDA's rules: numbers or beginnings of UUIDs; the list ends at the first -1. Raises UserError for anything else.
    """
    chosen: list[int] = []
    for word in (word.strip() for word in allowed.split(",")):
        if word in ("", "-1", "NoDevFiles"):
            break
        if word.startswith("MIG"):
            raise UserError(
                f"CUDA_VISIBLE_DEVICES={allowed}: deepspeed cannot start on a slice of a GPU; "
                "use `torchrun --nproc-per-node 1 -m trainer.train CONFIG`"
            )
        if word.isdigit():
            matches = [int(word)] if int(word) < len(identifiers) else []
        else:
            matches = [index for index, identifier in enumerate(identifiers) if identifier.startswith(word)]
        if len(matches) != 1:
            raise UserError(
                f"CUDA_VISIBLE_DEVICES={allowed}: {word} is not one of this machine's {len(identifiers)} GPUs; "
                "`nvidia-smi -L` lists them"
            )
        if matches[0] in chosen:
            raise UserError(f"CUDA_VISIBLE_DEVICES={allowed}: {word} is named twice; keep one")
        chosen += matches
    return chosen


def _installed_gpus() -> list[str]:
    """UUIDs of the GPUs, or names of their device files where nvidia-smi is not installed."""
    if shutil.which("nvidia-smi"):
        try:
            listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"nvidia-smi -L: {error}; the driver does not answer, or set DS_ACCELERATOR=cpu") from None
        # "GPU 0: NVIDIA H200 (UUID: GPU-4c1d...)", with an indented line for each MIG slice below it.
        gpus = [line for line in listing.stdout.splitlines() if line.startswith("GPU ")]
        return [line.rpartition("UUID: ")[2].rstrip(") ") for line in gpus]
    return sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))


def _deepspeed_executable() -> str:
    """The `deepspeed` of this Python: by name where the shell would find the same one, else by its path."""
    beside = Path(sys.executable).parent / "deepspeed"
    if not beside.is_file():
        return "deepspeed"
    found = shutil.which("deepspeed")
    return "deepspeed" if found and Path(found).samefile(beside) else str(beside)
