"""The faults: what goes wrong, in which phases, and what the user must have been told."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.workplace import Chaos, start
from tests.ends import HOST

# Calls of the functions that tests/cluster/mischief wraps: two sums a step and one an evaluation, two files a save.
CALL = {"tokenise": 1, "load": 1, "first step": 3, "step": 22, "data": 14, "evaluate": 2, "save": 3, "end": 1}
PHASES = tuple(CALL)
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
DISK_MB = 1200  # a run asks for 1 GiB before it begins


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    name: str
    phases: tuple[str, ...]
    told: str
    """A regular expression that the user's terminal must show; empty where nothing needs to be told."""
    action: str = ""
    """Of tests/cluster/mischief, in the rank itself."""
    rank: int = 1
    outside: Callable[[Chaos], None] | None = None
    """What is done from outside when the rank calls."""
    on_own_disk: bool = False
    settings: tuple[str, ...] = ()

    def begin(self, folder: Path, out: Path, phase: str) -> Chaos:
        """Start the run in which it happens."""
        where = "step" if phase == "first step" else phase
        rank = "" if phase == "tokenise" else "0" if phase == "end" else str(self.rank)
        kind = self.action or "call"
        variables = {}
        if self.name == "clock jump":
            clock = out.with_name(f"{out.name}.clock")
            clock.write_text("+0")
            variables = {"LD_PRELOAD": str(FAKETIME), "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1"}
            variables |= {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_DONT_RESET": "1"}
        mischief = f"{rank}:{kind}@{where}:{CALL[phase]}"
        return start(folder, out, *self.settings, mischief=mischief, **variables)

    def happen(self, run: Chaos) -> float:
        """Wait until it happens; when it did, by the clock."""
        when = run.wait_until_called()
        if self.outside is not None:
            self.outside(run)
            run.heard()
        return when

    def detected(self, run: Chaos, when: float) -> float | None:
        """Seconds until the user was told; None if never, or if there is nothing to tell."""
        for at, line in run.lines:
            if self.told and at >= when - 1.0 and re.search(self.told, line):
                return max(0.0, at - when)
        return None


def of_rank(number: int, rest: str = "") -> str:
    return rf"rank {number} on {re.escape(HOST)} {rest}"


def _kill_launcher(run: Chaos) -> None:
    os.kill(run.process.pid, signal.SIGKILL)


def _terminate(run: Chaos) -> None:
    os.kill(run.process.pid, signal.SIGTERM)


def _terminate_twice(run: Chaos) -> None:
    for _ in range(2):
        os.kill(run.process.pid, signal.SIGTERM)
        time.sleep(1.0)


def _fill_disk(run: Chaos) -> None:
    """To the last byte, until the run has told of it; then there is room again."""
    ballast = run.out.parent / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (2**20, 2**12):
            with suppress(OSError):
                while file.write(b"x" * size) == size:
                    pass
    run.heard()
    run.wait_for(lambda: "No space left on device" in run.text)
    ballast.unlink()


def _make_read_only(run: Chaos) -> None:
    """For everything that is opened from now on, as when a file system finds an error; then it is repaired."""
    subprocess.run(["mount", "--bind", str(run.out.parent), str(run.out.parent)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(run.out.parent)], check=True)
    run.heard()
    run.wait_for(lambda: "Read-only file system" in run.text)
    subprocess.run(["umount", "-l", str(run.out.parent)], check=False)


def _damage_and_kill(run: Chaos) -> None:
    newest = run.out / "checkpoint-8"
    run.wait_for((newest / "COMPLETE").exists)
    file = newest / "training_state-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    run.rank(1).kill()


def _second_run(run: Chaos) -> None:
    command = [sys.executable, "-m", "launcher.cli", "train", str(run.folder / "config.yaml"), f"output_dir={run.out}"]
    second = subprocess.run(command, cwd=run.folder, env=os.environ, capture_output=True, text=True, timeout=300)
    run.lines.append((time.time(), f"second run: exit code {second.returncode}: {second.stderr}"))


def _jump(run: Chaos) -> None:
    """Two hours ahead."""
    run.out.with_name(f"{run.out.name}.clock").write_text("+7200")
    time.sleep(3.0)


def _suspend_all(run: Chaos) -> None:
    """As a laptop's lid or a hypervisor does it: everything stands still, and goes on."""
    below = psutil.Process(run.process.pid).children(recursive=True)
    for process in below:
        process.suspend()
    time.sleep(20.0)
    for process in below:
        process.resume()


KILLED, REFUSED = "was killed by signal 9", r"second run: exit code 2: error: .*another run is in this"
FAULTS = (
    Fault("SIGKILL of a rank", ("load", "first step", "step", "evaluate", "save"), of_rank(1, KILLED), "kill"),
    Fault("SIGKILL of rank 0", ("step", "save", "end"), of_rank(0, KILLED), "kill", 0),
    Fault("SIGKILL of the tokenising process", ("tokenise",), "", "kill"),
    Fault("exception in a rank", ("load", "step", "evaluate", "save"), of_rank(1, "ended with exit code 1"), "raise"),
    Fault("loader that raises", ("data",), of_rank(1, "ended with exit code 1"), "raise"),
    Fault("SIGSTOP of a rank", ("step", "evaluate"), r"hangs: " + of_rank(1), "stop"),
    Fault("rank that hangs", ("step",), r"hangs: " + of_rank(1), "hang"),
    Fault("NaN in a loss", ("step",), r"ended with exit code 1", "nan"),
    Fault("SIGKILL of the launcher", ("load", "step", "save"), "", outside=_kill_launcher),
    Fault("SIGTERM", ("load", "step"), r"SIGTERM: (saving|stopping)", outside=_terminate),
    Fault("SIGTERM twice", ("step",), "stopping at once", outside=_terminate_twice),
    Fault("disk full", ("save",), "No space left on device", rank=0, outside=_fill_disk, on_own_disk=True),
    Fault("disk read-only", ("save",), "Read-only file system", rank=0, outside=_make_read_only, on_own_disk=True),
    Fault("corrupted checkpoint, rank killed", ("step",), "passed over checkpoint-8", outside=_damage_and_kill),
    Fault("two runs in one folder", ("step",), REFUSED, outside=_second_run),
    Fault("clock jump of 2 h", ("step",), "", outside=_jump),
    Fault("all halted for 20 s", ("step",), "", outside=_suspend_all),
)  # fmt: skip


def own_disk(folder: Path) -> Path:
    """A disk of a few MiB, mounted; needs root."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)], check=True)
    return folder


def give_back(folder: Path) -> None:
    """Unmount it."""
    subprocess.run(["umount", "-l", str(folder)], check=False)
    shutil.rmtree(folder, ignore_errors=True)
