"""Commands that start one process per GPU: on this machine, or on the hosts in a hostfile with DeepSpeed's launcher.

On this machine, ranks are started directly with the variables that DeepSpeed's launcher would set. This reveals their
exit status, and saves the time that the launcher's two processes spend on imports. `deepspeed --module
trainer.train` is equivalent and supported; a dry run prints it.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from trainer.config.errors import UserError, format_count
from trainer.config.files import read_text
from trainer.contract.default_ranks import CPU_RANKS
from trainer.contract.whole_files import write_text_atomic

GUARD_MODULE = "launcher.supervision.run_until_launcher_exits"
StreamTarget = int | IO[bytes] | None
# DeepSpeed's default hostfile, which exists in some container images.
IMPLICIT_HOSTFILE = Path("/job/hostfile")
# DeepSpeed starts ranks with `python -m`, which would otherwise import from the working directory first.
SAFE_PATH_VARIABLES = {"PYTHONSAFEPATH": "1"}
# If inherited from an outer job, these would make every child process appear to be a rank.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Prefixes of the variables to pass to ranks on other hosts; ssh forwards none.
EXPORTED_PREFIXES = (
    "CUDA_", "DS_", "GLOO_", "HF_", "MKL_", "NCCL_", "OMP_", "PYTHONPATH", "PYTHONSAFEPATH", "PYTORCH_", "TOKENIZERS_",
    "TORCH_", "TRANSFORMERS_", "TRITON_", "UCX_", "ZEROLORA_",
)  # fmt: skip
# GPU indices come from the hostfile, and only this host reads DS_ENV_FILE.
NOT_EXPORTED = ("CUDA_VISIBLE_DEVICES", "DS_ENV_FILE")
# Never exported, because every user on a host can read command lines.
SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD")


@dataclass(frozen=True)
class Command:
    argv: tuple[str, ...]
    ranks: int
    set_variables: Mapping[str, str]
    unset_variables: tuple[str, ...]
    rank_environments: tuple[Mapping[str, str], ...] = ()
    """Environment variables of each rank, if `argv` starts only one."""
    manual_argv: tuple[str, ...] = ()
    """Command to print, which starts all ranks, if `argv` starts only one."""

    def format_shell(self) -> str:
        unset = [f"-u{name}" for name in self.unset_variables if name in os.environ]
        changes = SAFE_PATH_VARIABLES | dict(self.set_variables)
        variables = [f"{name}={shlex.quote(value)}" for name, value in changes.items()]
        return " ".join((["env", *unset] if unset else []) + [*variables, shlex.join(self.manual_argv or self.argv)])

    def build_environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in self.unset_variables}
        return inherited | SAFE_PATH_VARIABLES | dict(self.set_variables)

    def start(self, stdout: StreamTarget, stderr: StreamTarget) -> list[subprocess.Popen[bytes]]:
        """Start every rank on this machine, or the launcher that starts them elsewhere.

        Each process has its own session, so that Ctrl-C in the terminal does not reach it.
        """
        guard = () if self.rank_environments else (sys.executable, "-m", GUARD_MODULE)
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
        self, argv: Sequence[str], variables: Mapping[str, str], stdin: int, stdout: StreamTarget, stderr: StreamTarget
    ) -> subprocess.Popen[bytes]:
        """Start a process with a rank's environment variables; the process inherits each stream that is None."""
        env = self.build_environment() | dict(variables)
        # Ranks on this machine inherit the file descriptor from `share_stdout`.
        streams: dict[str, Any] = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
        return subprocess.Popen(argv, env=env, **streams, start_new_session=True, close_fds=not self.rank_environments)


def build_local_command(
    arguments: Sequence[str], *, gpus: Sequence[int], num_gpus: int | None, port: int, module: str = "trainer.train"
) -> Command:
    """Return the command that runs `module` on this machine, with one rank per GPU, or on the CPU if `gpus` is empty.

    `gpus` are the indices of the usable GPUs; only the first `num_gpus` are used. Raises UserError if `num_gpus`
    exceeds the number of GPUs or, without GPUs, the number of cores.
    """
    if gpus and num_gpus is not None and num_gpus > len(gpus):
        raise UserError(f"--num-gpus {num_gpus}: only {format_count(len(gpus), 'GPU')} found; remove it to use all")
    cores = len(os.sched_getaffinity(0))
    if not gpus and num_gpus is not None and num_gpus > max(cores, CPU_RANKS):
        fix = f"use --num-gpus {max(cores, CPU_RANKS)} or fewer"
        raise UserError(f"--num-gpus {num_gpus}: no GPU found, and each CPU rank needs one of the {cores} cores; {fix}")
    numbers = list(gpus)[:num_gpus] if gpus else list(range(num_gpus or CPU_RANKS))
    manual_argv = [_find_deepspeed()]
    if IMPLICIT_HOSTFILE.is_file():
        manual_argv.append("--hostfile=/dev/null")
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(len(numbers)))
    set_variables: dict[str, str] = {}
    if gpus:
        # With `--num_gpus`, DeepSpeed would ignore CUDA_VISIBLE_DEVICES and use GPUs 0 to N-1.
        manual_argv.append("--include=localhost:" + ",".join(map(str, numbers)))
        shared["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, numbers))
    else:
        # By default, DeepSpeed starts one CPU rank per NUMA node, and most machines have one node.
        manual_argv.append(f"--num_gpus={len(numbers)}")
        set_variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    manual_argv += [f"--master_port={port}", "--module", module, *arguments]
    return Command(
        (sys.executable, "-u", "-m", module, *arguments),
        len(numbers),
        set_variables,
        # `--include` numbers all GPUs on the machine, not only the visible ones.
        (*RANK_VARIABLES, "CUDA_VISIBLE_DEVICES"),
        tuple(shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(len(numbers))),
        tuple(manual_argv),
    )


def build_hostfile_command(
    arguments: Sequence[str],
    *,
    hostfile: Path,
    slots: Mapping[str, Sequence[int]],
    address: str | None,
    port: int,
    environment_file: Path,
    module: str = "trainer.train",
) -> Command:
    """Return the command that runs `module` on every slot of every host with DeepSpeed's launcher over pdsh.

    `environment_file` contains the environment variables for ranks on other hosts. Raises UserError if pdsh is missing.
    """
    if shutil.which("pdsh") is None:
        raise UserError("--launcher hostfile: pdsh is not installed; run `apt install pdsh`, or use mpi or slurm")
    ranks = sum(len(gpus) for gpus in slots.values())
    argv = [_find_deepspeed(), f"--hostfile={hostfile}"]
    argv.append("--include=" + "@".join(f"{host}:{','.join(map(str, gpus))}" for host, gpus in slots.items()))
    # Without --force_multi, DeepSpeed starts the ranks on this machine if the hostfile has a single host.
    argv += ["--force_multi", "--launcher=pdsh", f"--master_port={port}"]
    argv += [f"--master_addr={address}"] if address else []
    argv += ["--module", module, *arguments, f"--world-size={ranks}"]
    variables = {"DS_ENV_FILE": str(environment_file.absolute())}
    return Command(tuple(argv), ranks, variables, (*RANK_VARIABLES, "CUDA_VISIBLE_DEVICES"))


def _find_deepspeed() -> str:
    """Return this environment's `deepspeed` command: its name if it is first on PATH, otherwise its path."""
    path, in_path = Path(sys.executable).parent / "deepspeed", shutil.which("deepspeed")
    if not path.is_file() or (in_path and Path(in_path).samefile(path)):
        return "deepspeed"
    return str(path)


def select_exported_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `env` that configure Python and the libraries, without secrets."""
    variables = {**env, **SAFE_PATH_VARIABLES}
    exported = {name: value for name, value in variables.items() if name.startswith(EXPORTED_PREFIXES)}
    secret = {name for name in exported if any(word in name.upper() for word in SECRET_WORDS)}
    return {name: value for name, value in exported.items() if name not in secret.union(NOT_EXPORTED)}


def write_environment(file: Path, env: Mapping[str, str]) -> None:
    """Write the variables in `env` and ~/.deepspeed_env to `file`, which DeepSpeed's launcher reads.

    PYTHONPATH is set because DeepSpeed's default value begins with the working directory. PATH begins with the
    folder of this Python and of the ninja that built the operators. Another ninja would rebuild them, and ranks
    would fail without ninja.
    """
    user_file = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    lines = [f"PATH={Path(sys.executable).parent}:$PATH", "PYTHONPATH="]
    for folder in (Path.home(), Path()):
        if (folder / user_file).is_file():
            lines += [line for line in read_text(folder / user_file).splitlines() if "=" in line]
    lines += [f"{name}={value}" for name, value in select_exported_variables(env).items() if "\n" not in value]
    write_text_atomic(file, "\n".join(lines))
