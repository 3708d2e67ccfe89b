"""The file of a folder's lock, and the processes that it names; used by folder_lock.py."""

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
    """Identifies the namespace of process IDs: host, boot and container."""
    pid: ProcessId
    started: int
    """Start in ticks since boot, which distinguishes processes with the same ID."""

    @classmethod
    def for_this_process(cls) -> "Holder":
        """Return the holder for the calling process."""
        host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        return cls(host, _machine(), os.getpid(), _process_start(os.getpid()) or 0)

    def is_alive(self) -> bool | None:
        """Return whether the process runs; None if it is on another machine."""
        if self.machine != _machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # of another user
        return _process_start(self.pid) in (self.started, None)


@dataclass(frozen=True)
class Lock:
    """The content of the file."""

    token: str
    """Unique for every run."""
    since: str
    job: str
    restarts: int
    """Number of restarts of the job by the scheduler."""
    holders: tuple[Holder, ...]

    @classmethod
    def for_this_process(cls) -> "Lock":
        """Create a lock for the calling process."""
        job = next((os.environ[name] for name in JOB_VARIABLES if name in os.environ), "")
        restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(secrets.token_hex(8), since, job, restarts, (Holder.for_this_process(),))

    def describe(self) -> str:
        """Describe its holder."""
        if not self.holders:
            return "an unknown process"
        job = f" of job {self.job}" if self.job else ""
        return f"process {self.holders[-1].pid} on {self.holders[-1].host}{job}, since {self.since}"

    def is_predecessor_of(self, other: "Lock") -> bool:
        """Return whether it belongs to an earlier start of the same job, which the scheduler has ended."""
        return bool(self.job) and self.job == other.job and self.restarts < other.restarts


def lock_path(run_dir: Path) -> Path:
    return run_dir / "logs" / LOCK_FILE


def create_lock(path: Path, lock: Lock) -> bool:
    """Create the file and its folder; returns False if the file exists."""
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
        path.unlink(missing_ok=True)  # on a full disk, an empty file would lock the folder for no one
        raise
    return True


def read_lock(path: Path) -> tuple[Lock, int] | None:
    """Return the lock and the time of its last heartbeat; None if there is none.

    An incomplete or damaged lock has no holders. Raises UnreadableFile for a folder or pipe, OSError for errors of the
    file system.
    """
    if path.exists() and not path.is_file():
        raise UnreadableFile(path, f"is a {'folder' if path.is_dir() else 'pipe or device'}", "move it away")
    try:
        # Opened every time, because this makes network file systems ask their server.
        with path.open("rb") as file:
            content, beat = file.read(), os.fstat(file.fileno()).st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return parse_json(content, path, Lock), beat
    except UnreadableFile:
        return Lock("", "", "", 0, ()), beat


def remove_lock(path: Path, token: str) -> None:
    """Remove the dead lock `token`, but not a new lock that has replaced it."""
    aside = path.with_name(f"{LOCK_FILE}.{secrets.token_hex(4)}")
    try:
        os.rename(path, aside)  # only one of several processes that see the same dead lock succeeds
    except FileNotFoundError:
        return
    found = read_lock(aside)
    if found is not None and found[0].token != token and not path.exists():
        os.rename(aside, path)
    aside.unlink(missing_ok=True)


def _machine() -> str:
    parts = [socket.gethostname()]
    try:
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        pass  # not Linux: only the name is used
    return " ".join(parts)


def _process_start(pid: int) -> int | None:
    """Return the start of a process in ticks since boot; -1 for a zombie."""
    fields = read_stat(pid)
    return None if fields is None else -1 if fields[0] in "ZX" else int(fields[19])
