"""How ranks on other hosts are told to stop, and how they are ended."""

import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from launcher.beats import read_beats
from launcher.hosts import Slots, run_on
from launcher.slurm import Allocation
from launcher.terminal import ConsoleFile

END_PATIENCE_S = 20.0


class Reach(Protocol):
    """The way from the launcher's process to the ranks below it."""

    def stop(self, process: subprocess.Popen[bytes], logs: Path) -> None:
        """Tell the ranks to save and stop; one that hears it is enough, for they agree by all-reduce."""

    def end(self, process: subprocess.Popen[bytes], logs: Path) -> None:
        """End every rank now."""


class ThroughLauncher:
    """srun and mpirun pass SIGUSR1 on to all ranks, and end them on SIGTERM."""

    def stop(self, process: subprocess.Popen[bytes], logs: Path) -> None:
        process.send_signal(signal.SIGUSR1)

    def end(self, process: subprocess.Popen[bytes], logs: Path) -> None:
        # SIGKILL would end the launcher alone.
        process.terminate()
        deadline = time.monotonic() + END_PATIENCE_S
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)


class ThroughSrun(ThroughLauncher):
    """srun, in an allocation whose nodes may be lost."""

    def __init__(self, allocation: Allocation) -> None:
        self.allocation = allocation


class ThroughSsh:
    """pdsh passes nothing on: each host is asked by ssh. Ranks are dealt out in the order of `slots`."""

    def __init__(self, slots: Slots) -> None:
        self._hosts = list(slots)
        self._host_of_rank = [host for host, gpus in slots.items() for _ in gpus]

    def stop(self, process: subprocess.Popen[bytes], logs: Path) -> None:
        alive = {rank: beat for rank, beat in sorted(read_beats(logs).items()) if beat.exit_code is None}
        rank, beat = next(iter(alive.items()), (0, None))
        if beat is not None:
            run_on(self._host_of_rank[rank], f"kill -USR1 {beat.pid}")

    def end(self, process: subprocess.Popen[bytes], logs: Path) -> None:
        if process.poll() == 0:
            return  # every launcher has seen its ranks end
        # Known by the run's own console file are its ranks, and the launchers that have not started theirs yet. Not the
        # `deepspeed` and pdsh above them, should this host be one of the file.
        console = re.sub(r"[^\w/]", ".", str(ConsoleFile.path_in(logs)))
        pattern = f"^[^ ]*python[^ ]* -u -m (deepspeed.launcher.launch|trainer.train) .*--console {console}"
        with ThreadPoolExecutor(max_workers=64) as pool:
            list(pool.map(lambda host: run_on(host, f"pkill -KILL -f '{pattern}'"), self._hosts))
