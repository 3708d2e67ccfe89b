"""The file of a folder's lock, and the processes that it names: whether they still run is asked of the kernel.

What is done with it: folder_lock.py.
"""

import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.config.files import ProcessId, UnreadableFile, parse_json
from trainer.contract.launcher_process import read_stat

LOCK_FILE = "lock.json"
JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


@dataclass(frozen=True)
class Holder:
    """A process that holds a lock."""

    host: str
    machine: str
    """Different wherever process numbers mean something else: another host, another boot, another container."""
    pid: ProcessId
    started: int
    """Ticks since boot, which tells it from a later process of the same number."""

    @classmethod
    def of_this_process(cls) -> "Holder":
        """The calling process."""
        host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        return cls(host, _machine(), os.getpid(), _start_of(os.getpid()) or 0)

    def is_alive(self) -> bool | None:
        """Whether the process runs; None if it is on another machine."""
        if self.machine != _machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # somebody else's
        return _start_of(self.pid) in (self.started, None)


@dataclass(frozen=True)
class Lock:
    """What stands in the file."""

    token: str
    """Different for every run."""
    since: str
    job: str
    restarts: int
    """How often the scheduler had started the job again."""
    holders: tuple[Holder, ...]

    @classmethod
    def of_this_process(cls) -> "Lock":
        """A new one."""
        job = next((os.environ[name] for name in JOB_VARIABLES if name in os.environ), "")
        restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(secrets.token_hex(8), since, job, restarts, (Holder.of_this_process(),))

    def told(self) -> str:
        """Its holder in words."""
        if not self.holders:
            return "an unknown process"
        job = f" of job {self.job}" if self.job else ""
        return f"process {self.holders[-1].pid} on {self.holders[-1].host}{job}, since {self.since}"

    def is_predecessor_of(self, other: "Lock") -> bool:
        """Whether it is of an earlier start of the same job, which the scheduler has ended."""
        return bool(self.job) and self.job == other.job and self.restarts < other.restarts


def path_in(run_dir: Path) -> Path:
    return run_dir / "logs" / LOCK_FILE


def create_lock(path: Path, lock: Lock) -> bool:
    """Make the file with this content, and its folder; False if there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(lock), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)  # a full disk: an empty one would hold the folder for nobody
        raise
    return True


def read_lock(path: Path) -> tuple[Lock, int] | None:
    """Return the lock and the time of its last beat; None if there is none.

    One that is half written, or damaged, has no holders. Raises UnreadableFile for a folder, OSError where the file
    system fails.
    """
    try:
        # Opened again for every look: that is when network file systems ask their server.
        with path.open("rb") as file:
            content, beat = file.read(), os.fstat(file.fileno()).st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError:
        raise UnreadableFile(path, "is a folder", "move it away") from None
    try:
        return parse_json(content, path, Lock), beat
    except UnreadableFile:
        return Lock("", "", "", 0, ()), beat


def remove_lock(path: Path, token: str) -> None:
    """Remove the dead lock `token`, and no other that has come in its place."""
    aside = path.with_name(f"{LOCK_FILE}.{secrets.token_hex(4)}")
    try:
        os.rename(path, aside)  # of several that see the same dead lock one succeeds
    except FileNotFoundError:
        return
    found = read_lock(aside)
    if found is not None and found[0].token != token and not path.exists():
        os.rename(aside, path)
    aside.unlink(missing_ok=True)


def _machine() -> str:
    """Host, boot and process namespace."""
    parts = [socket.gethostname()]
    try:
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        pass  # not Linux: the name has to do
    return " ".join(parts)


def _start_of(pid: int) -> int | None:
    """Return when a process started, in ticks since boot; -1 for one that has ended and is not collected yet."""
    fields = read_stat(pid)
    return None if fields is None else -1 if fields[0] in "ZX" else int(fields[19])
