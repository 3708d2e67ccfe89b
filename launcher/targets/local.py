"""Commands that start one process per GPU on this machine, or through DeepSpeed's launcher on the hosts of a file.

On this machine each rank is started directly, with the variables that DeepSpeed's launcher would set: this makes its
exit status known, and saves the seconds that the launcher's two processes take to import. `deepspeed --module
trainer.train` does the same and is supported; a dry run prints it.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trainer.config import UserError
from trainer.config.files import read_text
from trainer.contract.default_ranks import CPU_RANKS
from trainer.contract.whole_files import write_whole

Output = int | IO[bytes] | None
# DeepSpeed's implicit hostfile: some images have one, which would turn "this machine" into many.
IMPLICIT_HOSTFILE = Path("/job/hostfile")
# Without this `python -m`, as deepspeed starts every rank, imports from the working folder first.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
# Inherited from an outer job, these would make every child process look like a rank.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Variables that ranks on other hosts get from this shell, because ssh forwards none.
PREFIXES = (
    "CUDA_", "DS_", "GLOO_", "HF_", "MKL_", "NCCL_", "OMP_", "PYTHONPATH", "PYTHONSAFEPATH", "PYTORCH_", "TOKENIZERS_",
    "TORCH_", "TRANSFORMERS_", "TRITON_", "UCX_", "ZEROLORA_",
)  # fmt: skip
# The hostfile numbers the GPUs, and only this host reads the file of variables.
NOT_EXPORTED = ("CUDA_VISIBLE_DEVICES", "DS_ENV_FILE")
# Every user of a host can read a command line.
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


@dataclass(frozen=True)
class Command:
    """A command line, its changes to the environment, and the number of ranks it starts."""

    argv: tuple[str, ...]
    ranks: int
    set_variables: Mapping[str, str]
    unset_variables: tuple[str, ...]
    rank_environments: tuple[Mapping[str, str], ...] = ()
    """If `argv` starts one rank: the variables of each rank."""
    manual_argv: tuple[str, ...] = ()
    """If `argv` starts one rank: a command that starts all of them."""

    def shell(self) -> str:
        """Return the equivalent shell command."""
        unset = [f"-u{name}" for name in self.unset_variables if name in os.environ]
        changes = SAFE_PATH | dict(self.set_variables)
        variables = [f"{name}={shlex.quote(value)}" for name, value in changes.items()]
        return " ".join((["env", *unset] if unset else []) + [*variables, shlex.join(self.manual_argv or self.argv)])

    def environment(self) -> dict[str, str]:
        """Return this process's environment with the command's changes."""
        kept = {name: value for name, value in os.environ.items() if name not in self.unset_variables}
        return kept | SAFE_PATH | dict(self.set_variables)

    def start(self, stdout: Output, stderr: Output) -> list[subprocess.Popen[bytes]]:
        """Start every rank on this machine, or the launcher that starts them elsewhere.

        Each process gets its own session, so that the terminal's Ctrl-C does not reach it.
        """
        guard = () if self.rank_environments else (sys.executable, "-m", "launcher.supervision.end_with_launcher")
        started: list[subprocess.Popen[bytes]] = []
        try:
            for variables in self.rank_environments or ({},):
                started.append(self.start_process((*guard, *self.argv), variables, subprocess.DEVNULL, stdout, stderr))
        except OSError:
            for process in started:
                process.kill()
                process.wait()
            raise
        return started

    def start_process(
        self, argv: Sequence[str], variables: Mapping[str, str], stdin: int, stdout: Output, stderr: Output
    ) -> subprocess.Popen[bytes]:
        """Start one process with the variables of a rank; `stdout` and `stderr` None inherit ours."""
        env = self.environment() | dict(variables)
        return subprocess.Popen(argv, env=env, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True)


def local_command(
    arguments: Sequence[str], *, gpus: Sequence[int], num_gpus: int | None, port: int, module: str = "trainer.train"
) -> Command:
    """Return the command that runs `module` on this machine: a rank per GPU, or CPU ranks if `gpus` is empty.

    `gpus` are the numbers of the usable GPUs; `num_gpus` takes the first of them, or that many CPU ranks. Raises
    UserError if `num_gpus` exceeds the GPUs, or without GPUs the cores.
    """
    if num_gpus is not None and num_gpus < 1:
        raise UserError(f"--num-gpus {num_gpus}: must be 1 or more")
    if gpus and num_gpus is not None and num_gpus > len(gpus):
        raise UserError(f"--num-gpus {num_gpus}: this machine offers {len(gpus)}; leave it out to use all")
    cores = len(os.sched_getaffinity(0))
    if not gpus and num_gpus is not None and num_gpus > max(cores, CPU_RANKS):
        raise UserError(
            f"--num-gpus {num_gpus}: no GPU found, and this process may use {cores} cores; a rank needs one: use "
            f"--num-gpus {max(cores, CPU_RANKS)} or fewer"
        )
    numbers = list(gpus)[:num_gpus] if gpus else list(range(num_gpus or CPU_RANKS))
    manual_argv = [_deepspeed_executable()]
    if IMPLICIT_HOSTFILE.is_file():
        manual_argv.append("--hostfile=/dev/null")
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(len(numbers)))
    set_variables: dict[str, str] = {}
    if gpus:
        # Not `--num_gpus`, with which DeepSpeed ignores CUDA_VISIBLE_DEVICES and takes GPUs 0 to N-1.
        manual_argv.append("--include=localhost:" + ",".join(map(str, numbers)))
        shared["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, numbers))
    else:
        # DeepSpeed's CPU "devices" are NUMA nodes, one on most machines; only this option starts more ranks.
        manual_argv.append(f"--num_gpus={len(numbers)}")
        set_variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    manual_argv += [f"--master_port={port}", "--module", module, *arguments]
    return Command(
        (sys.executable, "-u", "-m", module, *arguments),
        len(numbers),
        set_variables,
        # `--include` counts all GPUs of the machine, not only the visible ones.
        (*RANK_VARIABLES, "CUDA_VISIBLE_DEVICES"),
        tuple(shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(len(numbers))),
        tuple(manual_argv),
    )


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
    """Return the command that runs `module` on every slot of every host, by DeepSpeed's launcher over pdsh.

    `environment_file` holds the variables for ranks on other hosts. Raises UserError without pdsh.
    """
    if shutil.which("pdsh") is None:
        raise UserError("--launcher hostfile: pdsh is not installed; run `apt install pdsh`, or use mpi or slurm")
    ranks = sum(len(gpus) for gpus in slots.values())
    argv = [_deepspeed_executable(), f"--hostfile={hostfile}"]
    argv.append("--include=" + "@".join(f"{host}:{','.join(map(str, gpus))}" for host, gpus in slots.items()))
    # With a single host in the file DeepSpeed would start the ranks on this one.
    argv += ["--force_multi", "--launcher=pdsh", f"--master_port={port}"]
    argv += [f"--master_addr={address}"] if address else []
    argv += ["--module", module, *arguments, f"--world-size={ranks}"]
    variables = {"DS_ENV_FILE": str(environment_file.absolute())}
    return Command(tuple(argv), ranks, variables, (*RANK_VARIABLES, "CUDA_VISIBLE_DEVICES"))


def _deepspeed_executable() -> str:
    """Return the `deepspeed` of this Python: by name if the shell would find the same one, else by path."""
    own = Path(sys.executable).parent / "deepspeed"
    if not own.is_file():
        return "deepspeed"
    found = shutil.which("deepspeed")
    return "deepspeed" if found and Path(found).samefile(own) else str(own)


def exported_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `env` that configure Python and the libraries, without secrets."""
    return {
        name: value
        for name, value in {**env, **SAFE_PATH}.items()
        if name.startswith(PREFIXES) and name not in NOT_EXPORTED and not any(word in name.upper() for word in SECRET)
    }


def write_environment(file: Path, env: Mapping[str, str]) -> None:
    """Write `file`, which DeepSpeed's launcher reads instead of ~/.deepspeed_env, including the user's own variables.

    PYTHONPATH is this shell's, because DeepSpeed's begins with the working folder. PATH begins with the folder of this
    Python and its ninja, which builds the operators: another ninja would rebuild them, and without one ranks fail.
    """
    own = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    lines = [f"PATH={Path(sys.executable).parent}:$PATH", "PYTHONPATH="]
    for folder in (Path.home(), Path()):
        if (folder / own).is_file():
            lines += [line for line in read_text(folder / own).splitlines() if "=" in line]
    lines += [f"{name}={value}" for name, value in exported_variables(env).items() if "\n" not in value]
    write_whole(file, "\n".join(lines))
