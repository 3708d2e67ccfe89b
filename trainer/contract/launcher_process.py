"""Exit this process once the `zerolora` process that started it has exited.

| this process runs                    | the launcher is lost if                      | exit after         |
|--------------------------------------|----------------------------------------------|--------------------|
| on the `zerolora` process's host     | its process has exited (not merely stopped)  | seconds            |
| under srun, mpirun, deepspeed or     | the process that started this rank, such as  | seconds            |
| torchrun, with or without `zerolora` | slurmstepd or orted, has exited              |                    |
| on another host                      | the pipe to it through ssh is closed         | seconds            |
| on another host                      | it no longer touches logs/launcher-alive     | `launcher_timeout` |

A thread checks this, because the main thread may be waiting in a collective. It also kills child processes.
Nothing is saved, and an incomplete checkpoint is never renamed into place.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from trainer.config.files import ProcessId
from trainer.contract.exit_codes import EXIT_FAILED

LAUNCHER_VARIABLE = "ZEROLORA_LAUNCHER"
ALIVE_FILE = "launcher-alive"
ALIVE_EVERY_S = 5.0
CHECK_EVERY_S = 1.0
# Processes that srun and mpirun use to start the ranks on each host.
DAEMONS = ("slurmstepd", "orted", "orterun", "prted", "prterun", "mpirun", "mpiexec", "hydra_pmi_proxy", "pmi_proxy")
DAEMON_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
# Set by torchrun and DeepSpeed's launcher. Without these, the parent may be a script that exits normally.
PARENT_VARIABLES = ("TORCHELASTIC_RUN_ID", "CROSS_RANK")


@dataclass(frozen=True)
class ProcessIdentity:
    """Identifies a process uniquely across hosts."""

    kernel: str
    """Boot ID of the kernel, and PID namespace."""
    pid: ProcessId
    started: str
    """Start time in kernel ticks since boot."""

    @classmethod
    def read(cls, pid: int) -> "ProcessIdentity | None":
        fields = read_stat(pid)
        return None if fields is None else cls(_read_kernel_id(), pid, fields[19])

    @classmethod
    def parse(cls, text: str) -> "ProcessIdentity | None":
        words = text.split("/")
        return cls(words[0], int(words[1]), words[2]) if len(words) == 3 and words[1].isdigit() else None

    def __str__(self) -> str:
        return f"{self.kernel}/{self.pid}/{self.started}"

    def is_visible(self) -> bool:
        """Return whether the process is on this host and in this PID namespace."""
        return self.kernel == _read_kernel_id()

    def is_alive(self) -> bool | None:
        """Return whether the process is running and not a zombie; None if it is not visible."""
        if not self.is_visible():
            return None
        fields = read_stat(self.pid)
        if fields is None:
            return psutil.pid_exists(self.pid)  # /proc may hide processes of other users
        return fields[19] == self.started and fields[0] not in "ZX"


def export_launcher_identity() -> None:
    """Identify this process to its children, so that their `LauncherWatch` ends them when it exits."""
    os.environ[LAUNCHER_VARIABLE] = str(ProcessIdentity.read(os.getpid()))


def touch_alive_file(logs: Path, ended: threading.Event) -> None:
    """Touch logs/launcher-alive, which ranks on other hosts watch, until `ended` is set; tolerate disk errors."""
    has_failed = False
    while True:
        try:
            (logs / ALIVE_FILE).touch()
            has_failed = False
        except OSError as error:  # ranks tolerate missing heartbeats for a while
            if not has_failed:
                print(f"{logs / ALIVE_FILE}: {error}", file=sys.stderr)
            has_failed = True
        if ended.wait(ALIVE_EVERY_S):
            return


class LauncherWatch:
    """Exits this process once its launcher has exited."""

    def __init__(self, environment: Mapping[str, str], *, is_rank: bool) -> None:
        self._launcher = ProcessIdentity.parse(environment.get(LAUNCHER_VARIABLE, ""))
        self._starter = _find_external_launcher(environment) if is_rank else None
        self._file: Path | None = None
        self._timeout_s = 0.0
        # A copy, because stderr will be redirected to a log.
        self._stderr = os.dup(2) if self._launcher is not None and not self._launcher.is_visible() else None
        self._seen: tuple[int, float] | None = None

    def start(self) -> None:
        """Start the thread if this process has a launcher."""
        if self._launcher is not None or self._starter is not None:
            threading.Thread(target=self._run, name="launcher watch", daemon=True).start()

    def watch_file(self, logs: Path, timeout_s: float) -> None:
        """Also treat the launcher as lost if its heartbeat file is unchanged for `timeout_s` seconds.

        The file is logs/launcher-alive. It is only checked if the launcher is on another host or in another PID
        namespace.
        """
        self._timeout_s, self._file = timeout_s, logs / ALIVE_FILE

    def describe_lost_launcher(self) -> str | None:
        launcher, starter = self._launcher, self._starter
        if launcher is not None and launcher.is_alive() is False:
            return f"the zerolora process {launcher.pid}, which started this one, has exited"
        if starter is not None and not starter.is_alive():
            return f"process {starter.pid}, which started this one, has exited"
        if self._stderr is not None and _is_closed(self._stderr):
            return "the connection to the zerolora process, which started this one, is closed"
        if launcher is not None and not launcher.is_visible() and self._has_stale_heartbeat():
            return f"no heartbeat of the zerolora process for {self._timeout_s:g} s (training.launcher_timeout)"
        return None

    def _has_stale_heartbeat(self) -> bool:
        if self._file is None or not self._timeout_s:
            return False
        touched = self._seen[0] if self._seen else None
        try:
            # Opening the file makes network file systems refresh its mtime, which is only compared with earlier values.
            with self._file.open("rb") as file:
                touched = os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            if self._seen is None:
                return False  # the folder is not shared
        except OSError:
            self._seen = None  # a failure of the file server, not of the launcher
        now = time.monotonic()
        if touched is not None and (self._seen is None or touched != self._seen[0]):
            self._seen = (touched, now)
        return self._seen is not None and now - self._seen[1] > self._timeout_s

    def _run(self) -> None:
        while (loss := self.describe_lost_launcher()) is None:
            time.sleep(CHECK_EVERY_S)
        os.write(2, f"process {os.getpid()}: {loss}; exiting without a checkpoint\n".encode())
        kill_children_and_exit()


def kill_children_and_exit() -> None:
    """Kill all child processes and exit with EXIT_FAILED immediately, without waiting for the main thread."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    os._exit(EXIT_FAILED)


def _is_closed(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _find_external_launcher(environment: Mapping[str, str]) -> ProcessIdentity | None:
    """Return the process of srun, mpirun, torchrun or DeepSpeed that started this rank; None if none of them did."""
    if any(name in environment for name in DAEMON_VARIABLES):
        try:
            daemons = [process for process in psutil.Process().parents() if process.name().startswith(DAEMONS)]
        except psutil.Error:
            return None
        if daemons:
            return ProcessIdentity.read(daemons[0].pid)
    if any(name in environment for name in PARENT_VARIABLES):
        return ProcessIdentity.read(os.getppid())
    return None


def read_stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat, starting with the state; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _read_kernel_id() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
