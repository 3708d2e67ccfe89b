"""The ends of real runs of a tiny model: on two CPU ranks (cluster) and on two GPUs (gpu)."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.tiny import write_run

HOST = socket.gethostname()
MISCHIEF = Path(__file__).parent / "cluster" / "mischief"
"""On PYTHONPATH with ZEROLORA_MISCHIEF set, its sitecustomize.py lets something go wrong in a rank."""
TRAIN = (sys.executable, "-m", "launcher.cli", "train")
# A loaded machine needs minutes where an idle one needs seconds; what must be quick is measured by itself.
PATIENCE_S = 300.0


class Run:
    """One run under way."""

    def __init__(self, process: subprocess.Popen[str], logs: Path) -> None:
        self.process = process
        self.logs = logs

    def beat(self, rank: int) -> dict[str, object]:
        try:
            found: dict[str, object] = json.loads((self.logs / f"heartbeat-{rank}.json").read_text().splitlines()[0])
            return found
        except (OSError, ValueError, IndexError):
            return {"step": 0}

    def pid(self, rank: int) -> int:
        return int(str(self.beat(rank)["pid"]))

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while any(int(str(self.beat(rank)["step"])) < step for rank in (0, 1)):
            assert self.process.poll() is None and time.monotonic() < deadline, self.process.communicate()
            time.sleep(0.1)

    def wait_for_phase(self, phase: str, rank: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not str(self.beat(rank).get("phase", "")).startswith(phase):
            assert self.process.poll() is None and time.monotonic() < deadline, self.process.communicate()
            time.sleep(0.1)

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err


Start = Callable[..., Run]


def write_endless_run(folder: Path) -> Path:
    """Write model, chats and config.yaml of a run that trains until something ends it; return the folder."""
    training = {"batch_size": 2, "max_steps": 100_000, "save_steps": 0, "max_restarts": 0}
    return write_run(folder, chats=200, training=training)


@contextmanager
def runs_below(folder: Path, env: Mapping[str, str]) -> Iterator[Start]:
    """A function that starts runs, `mischief` in them where it is given; none outlives the block."""
    runs: list[Run] = []

    def start(command: list[str], *settings: str, mischief: str = "", name: str = "run") -> Run:
        changes = {}
        if mischief:
            changes = {"ZEROLORA_MISCHIEF": mischief, "PYTHONPATH": os.pathsep.join([str(MISCHIEF), env["PYTHONPATH"]])}
        process = subprocess.Popen(
            [*command, f"output_dir={folder / name}", *settings],
            env={**env, **changes}, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        runs.append(Run(process, folder / name / "logs"))
        return runs[-1]

    try:
        yield start
    finally:
        for run in runs:
            if run.process.poll() is None:
                for rank in (0, 1):
                    if "pid" in run.beat(rank) and psutil.pid_exists(run.pid(rank)):
                        os.kill(run.pid(rank), signal.SIGKILL)
                run.process.kill()
                run.process.communicate()
