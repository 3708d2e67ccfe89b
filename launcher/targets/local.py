"""From a machine and a configuration to the command that starts one process per GPU.

On this machine each rank is started directly, with the variables that DeepSpeed's launcher would set: its exit status
is then known, and the seconds that the launcher's two processes take to import are saved. `deepspeed --module
trainer.train` does the same and stays supported; a dry run prints it.
"""

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trainer.config import UserError
from trainer.contract.default_ranks import CPU_RANKS

Output = int | IO[bytes] | None
# Where DeepSpeed looks for a hostfile without being asked: some images have one, and "this machine" would become many.
IMPLICIT_HOSTFILE = Path("/job/hostfile")
# `-m`, which deepspeed uses on every rank, would import from the working folder first.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
# Left over from an outer job, these would make every process below us look like a rank.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Command:
    """A command line, what it changes in the environment, and how many ranks it starts."""

    argv: tuple[str, ...]
    ranks: int
    set_variables: Mapping[str, str]
    unset_variables: tuple[str, ...]
    of_each_rank: tuple[Mapping[str, str], ...] = ()
    """Where `argv` is one rank: the variables that it gets when it is started as rank 0, 1 and so on."""
    by_hand: tuple[str, ...] = ()
    """Where `argv` is one rank: a command that starts all of them."""

    def shell(self) -> str:
        """Return one line that does the same when pasted into a shell."""
        unset = [f"-u{name}" for name in self.unset_variables if name in os.environ]
        changes = SAFE_PATH | dict(self.set_variables)
        variables = [f"{name}={shlex.quote(value)}" for name, value in changes.items()]
        return " ".join((["env", *unset] if unset else []) + [*variables, shlex.join(self.by_hand or self.argv)])

    def environment(self) -> dict[str, str]:
        """This process's environment with the changes made."""
        kept = {name: value for name, value in os.environ.items() if name not in self.unset_variables}
        return kept | SAFE_PATH | dict(self.set_variables)

    def start(self, stdout: Output, stderr: Output) -> list[subprocess.Popen[bytes]]:
        """The process of every rank on this machine, or that of the launcher which starts them elsewhere.

        Each leads a session of its own, where the terminal's Ctrl-C does not reach it.
        """
        argv = self.argv if self.of_each_rank else (sys.executable, "-m", "launcher.supervision.tied", *self.argv)
        started: list[subprocess.Popen[bytes]] = []
        try:
            for variables in self.of_each_rank or ({},):
                started.append(self._start(argv, variables, subprocess.DEVNULL, stdout, stderr))
        except OSError:
            for process in started:
                process.kill()
                process.wait()
            raise
        return started

    def start_rank(
        self, variables: Mapping[str, str], channel: socket.socket, output: Output, *more: str
    ) -> subprocess.Popen[bytes]:
        """One rank of this machine with more arguments; `channel` is its standard input, and None output is ours."""
        return self._start((*self.argv, *more), variables, channel.fileno(), output, output)

    def _start(
        self, argv: Sequence[str], variables: Mapping[str, str], stdin: int, stdout: Output, stderr: Output
    ) -> subprocess.Popen[bytes]:
        env = self.environment() | dict(variables)
        return subprocess.Popen(argv, env=env, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True)


def local_command(
    arguments: Sequence[str], *, gpus: Sequence[int], num_gpus: int | None, port: int, module: str = "trainer.train"
) -> Command:
    """The command that runs `module` with `arguments` on this machine: a rank per GPU, or CPU ranks if `gpus` is empty.

    `gpus` are the numbers of the GPUs that may be used; `num_gpus` takes the first so many of them, or that many CPU
    ranks. Raises UserError if `num_gpus` is more than there are, or more CPU ranks than cores.
    """
    if num_gpus is not None and num_gpus < 1:
        raise UserError(f"--num-gpus {num_gpus}: must be 1 or more")
    if gpus and num_gpus is not None and num_gpus > len(gpus):
        raise UserError(f"--num-gpus {num_gpus}: this machine offers {len(gpus)}; leave it out to use all")
    cores = len(os.sched_getaffinity(0))
    if not gpus and num_gpus is not None and num_gpus > max(cores, CPU_RANKS):
        raise UserError(
            f"--num-gpus {num_gpus}: there is no GPU, and this process may use {cores} cores; a rank needs one: use "
            f"--num-gpus {max(cores, CPU_RANKS)} or fewer"
        )
    numbers = list(gpus)[:num_gpus] if gpus else list(range(num_gpus or CPU_RANKS))
    by_hand = [_deepspeed_executable()]
    if IMPLICIT_HOSTFILE.is_file():
        by_hand.append("--hostfile=/dev/null")
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(len(numbers)))
    set_variables: dict[str, str] = {}
    if gpus:
        # Not `--num_gpus`: with that one DeepSpeed takes GPUs 0 to N-1, whatever CUDA_VISIBLE_DEVICES says.
        by_hand.append("--include=localhost:" + ",".join(map(str, numbers)))
        shared["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, numbers))
    else:
        # DeepSpeed's CPU "devices" are the memory nodes, one on most machines; only this option starts more ranks.
        by_hand.append(f"--num_gpus={len(numbers)}")
        set_variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    by_hand += [f"--master_port={port}", "--module", module, *arguments]
    return Command(
        (sys.executable, "-u", "-m", module, *arguments),
        len(numbers),
        set_variables,
        # `--include` counts the GPUs of the machine, whatever is visible.
        (*RANK_VARIABLES, "CUDA_VISIBLE_DEVICES"),
        tuple(shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(len(numbers))),
        tuple(by_hand),
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


def _deepspeed_executable() -> str:
    """The `deepspeed` of this Python: by name where the shell would find the same one, else by its path."""
    beside = Path(sys.executable).parent / "deepspeed"
    if not beside.is_file():
        return "deepspeed"
    found = shutil.which("deepspeed")
    return "deepspeed" if found and Path(found).samefile(beside) else str(beside)
