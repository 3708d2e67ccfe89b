"""Which `zerolora` process started this one, and whether it still lives: what is started ends with what started it.

| where                                | sign that it is gone                                   | it ends within     |
|--------------------------------------|--------------------------------------------------------|--------------------|
| the host of the `zerolora` process   | no such process; one that is stopped is alive          | seconds            |
| below srun, mpirun, deepspeed,       | slurmstepd, orted ... above this process has ended     | seconds            |
| torchrun, with `zerolora` or without |                                                        |                    |
| another host                         | the pipe to it is closed: its ssh has ended            | seconds            |
| another host                         | logs/launcher-alive, which it touches, does not change | `launcher_timeout` |

A thread looks, for the main thread may wait in a collective. It takes the processes below this one along, and nothing
is saved: a checkpoint that is not whole yet is never renamed into place.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from trainer.contract.exit_codes import EXIT_FAILED

VARIABLE = "ZEROLORA_LAUNCHER"
ALIVE_FILE = "launcher-alive"
ALIVE_EVERY_S = 5.0
LOOK_EVERY_S = 1.0
# What srun and mpirun start on each host, and what starts the ranks there.
DAEMONS = ("slurmstepd", "orted", "orterun", "prted", "prterun", "mpirun", "mpiexec", "hydra_pmi_proxy", "pmi_proxy")
DAEMON_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
# Set by torchrun, and by DeepSpeed's launcher. Of a process that has RANK from elsewhere nothing is known: a script may
# have started it in the background and ended.
PARENT_VARIABLES = ("TORCHELASTIC_RUN_ID", "CROSS_RANK")


@dataclass(frozen=True)
class ProcessMark:
    """A process by what no other one has, on this host or another."""

    kernel: str
    """The boot of the kernel and the namespace in which numbers of processes mean the same."""
    pid: int
    started: str
    """In the kernel's ticks since the boot."""

    @classmethod
    def of(cls, pid: int) -> "ProcessMark | None":
        """The mark of a process of this host; None if it has ended."""
        fields = read_stat(pid)
        return None if fields is None else cls(_kernel(), pid, fields[19])

    @classmethod
    def parse(cls, text: str) -> "ProcessMark | None":
        """The inverse of `str`; None for anything else."""
        words = text.split("/")
        return cls(words[0], int(words[1]), words[2]) if len(words) == 3 and words[1].isdigit() else None

    def __str__(self) -> str:
        return f"{self.kernel}/{self.pid}/{self.started}"

    def can_be_seen(self) -> bool:
        """Whether this process would see it if it were alive."""
        return self.kernel == _kernel()

    def lives(self) -> bool:
        """Whether it is there; one that only waits to be collected by its parent has ended."""
        fields = read_stat(self.pid)
        return fields is not None and fields[19] == self.started and fields[0] not in "ZX"


def tie_children_to_this_process() -> None:
    """From here on, what this process starts ends when this process does."""
    os.environ[VARIABLE] = str(ProcessMark.of(os.getpid()))


def keep_alive_file(logs: Path, ended: threading.Event) -> None:
    """Touch logs/launcher-alive, for ranks on other hosts, until the event is set; that needs no room on the disk."""
    fails = False
    while True:
        try:
            (logs / ALIVE_FILE).touch()
            fails = False
        except OSError as error:  # the ranks' patience is longer
            if not fails:
                print(f"{logs / ALIVE_FILE}: {error}", file=sys.stderr)
            fails = True
        if ended.wait(ALIVE_EVERY_S):
            return


class LauncherWatch:
    """Ends this process when what started it is gone."""

    def __init__(self, environment: Mapping[str, str], *, is_rank: bool) -> None:
        self._launcher = ProcessMark.parse(environment.get(VARIABLE, ""))
        self._above = _process_above(environment) if is_rank else None
        self._file: Path | None = None
        self._timeout_s = 0.0
        # The descriptor itself will be a log's soon.
        self._stderr = os.dup(2) if self._launcher is not None and not self._launcher.can_be_seen() else None
        self._seen: tuple[int, float] | None = None

    def start(self) -> None:
        """Look from now on, in a thread, if there is anything to look at."""
        if self._launcher is not None or self._above is not None:
            threading.Thread(target=self._run, name="launcher watch", daemon=True).start()

    def look_at_file(self, logs: Path, timeout_s: float) -> None:
        """Also end when the launcher's file in `logs` has not changed for so long, if its process cannot be seen."""
        self._timeout_s, self._file = timeout_s, logs / ALIVE_FILE

    def what_is_gone(self) -> str | None:
        """What this process has lost, in words; None while all is well."""
        launcher, above = self._launcher, self._above
        if launcher is not None and launcher.can_be_seen() and not launcher.lives():
            return f"the zerolora process {launcher.pid}, which started this one, is gone"
        if above is not None and not above.lives():
            return f"process {above.pid}, which started this one, is gone"
        if self._stderr is not None and _is_closed(self._stderr):
            return "the connection to the zerolora process, which started this one, is closed"
        if launcher is not None and not launcher.can_be_seen() and self._is_silent():
            return f"no sign of life of the zerolora process for {self._timeout_s:g} s (training.launcher_timeout)"
        return None

    def _is_silent(self) -> bool:
        if self._file is None or not self._timeout_s:
            return False
        touched = self._seen[0] if self._seen else None
        try:
            # Opened, for network file systems look again then; no clocks are compared, only whether it has changed.
            with self._file.open("rb") as file:
                touched = os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            if self._seen is None:
                return False  # a folder that hosts do not share tells nothing
        except OSError:
            self._seen = None  # a file server that fails says nothing about the launcher
        now = time.monotonic()
        if touched is not None and (self._seen is None or touched != self._seen[0]):
            self._seen = (touched, now)
        return self._seen is not None and now - self._seen[1] > self._timeout_s

    def _run(self) -> None:
        while (gone := self.what_is_gone()) is None:
            time.sleep(LOOK_EVERY_S)
        os.write(2, f"process {os.getpid()}: {gone}; ending without a checkpoint\n".encode())
        end_with_children(EXIT_FAILED)


def end_with_children(exit_code: int) -> None:
    """End this process and everything below it, now, whatever its main thread does."""
    for process in psutil.Process().children(recursive=True):
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    os._exit(exit_code)


def _is_closed(descriptor: int) -> bool:
    """Whether nobody is left to read what is written to a pipe or a socket."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _process_above(environment: Mapping[str, str]) -> ProcessMark | None:
    """What srun, mpirun, torchrun or DeepSpeed's launcher has put above a rank; None if none of them started it."""
    if any(name in environment for name in DAEMON_VARIABLES):
        try:
            daemons = [process for process in psutil.Process().parents() if process.name().startswith(DAEMONS)]
        except psutil.Error:
            return None
        if daemons:
            return ProcessMark.of(daemons[0].pid)
    if any(name in environment for name in PARENT_VARIABLES):
        return ProcessMark.of(os.getppid())
    return None


def read_stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _kernel() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
