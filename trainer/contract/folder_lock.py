"""Lock an output folder with OUTPUT_DIR/logs/lock.json, so that only one run uses it at a time.

The file lists its holders: the launcher and, once it has joined, rank 0; without our launcher, only rank 0. It is
created with O_EXCL, which also works on network file systems. A thread in each holder touches it every few seconds.
Holders on this machine are identified by process ID and start time. Holders elsewhere are considered dead once the
file's mtime has not changed for STALE_S by the local clock. `check` raises FolderLostError in a holder that lost its
lock because it was stopped or disconnected.
"""

import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from trainer.config.errors import UserError
from trainer.config.files import UnreadableFileError, parse_json
from trainer.contract.launcher_process import ProcessIdentity
from trainer.contract.rendezvous import get_host_name
from trainer.contract.whole_files import write_json

LOCK_FILE = "lock.json"
JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
HEARTBEAT_INTERVAL_S = 5.0
STALE_S = 120.0
"""Longer than network file systems cache attributes (60 s), and longer than libraries block Python threads."""
MAX_WAIT_S = 900.0
"""Maximum time that a restarted job waits for its earlier attempt to exit."""
POLL_S = 1.0
# Network file systems show files from other hosts with a delay.
MAX_DELAY_S = 30.0


class FolderLostError(UserError):
    """Raised if another run has taken over the folder; this run must no longer write to it."""

    exit_code = 1


@dataclass(frozen=True)
class Holder:
    host: str
    process: ProcessIdentity

    @classmethod
    def for_current_process(cls) -> "Holder":
        identity = ProcessIdentity.read(os.getpid())
        assert identity is not None, "/proc lacks this process"
        return cls(get_host_name(), identity)


@dataclass(frozen=True)
class LockRecord:
    token: str
    """Unique for each run."""
    since: str
    job: str
    restarts: int
    """Number of times that the scheduler restarted the job."""
    holders: tuple[Holder, ...]
    beat: int = 0
    """Modification time of the file in nanoseconds, set by every heartbeat."""

    @classmethod
    def for_current_process(cls) -> "LockRecord":
        job = next((os.environ[name] for name in JOB_VARIABLES if name in os.environ), "")
        restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(secrets.token_hex(8), since, job, restarts, (Holder.for_current_process(),))

    def describe(self) -> str:
        if not self.holders:
            return "an unknown process"
        job = f" of job {self.job}" if self.job else ""
        return f"process {self.holders[-1].process.pid} on {self.holders[-1].host}{job}, since {self.since}"

    def is_alive(self) -> bool | None:
        """Return whether a holder is alive; None if unknown, because a holder is on another machine."""
        states = [holder.process.is_alive() for holder in self.holders]
        return True if any(states) else None if not states or None in states else False


class FolderLock:
    """The lock of a run's folder, held by this process until `release` or the end of the `with` block."""

    def __init__(self, run_dir: Path, lock: LockRecord, *, owns: bool) -> None:
        self._run_dir, self._path, self._lock, self._owns = run_dir, get_lock_path(run_dir), lock, owns
        self.token = lock.token
        """Token with which rank 0 joins the lock."""
        self.is_held = True
        """Whether this run still held the lock at the last check."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="folder lock", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls, run_dir: Path, *, resumes: bool, log: Callable[[str], None]) -> "FolderLock":
        """Lock the folder, creating it if it does not exist.

        Takes over the lock if its holders are dead. Waits for a live holder that is an earlier attempt of this job or,
        under a scheduler, if `resumes` is set. Raises UserError if the folder stays locked.
        """
        path, lock, monitor = get_lock_path(run_dir), LockRecord.for_current_process(), _HolderMonitor()
        deadline, reported = time.monotonic() + MAX_WAIT_S, ""
        while not _create_lock_file(path, lock):
            held = _read_lock(path)
            if held is None:
                continue  # just released
            alive = monitor.is_alive(held)
            if alive is False:
                log(f"note: output_dir={run_dir}: its last run ({held.describe()}) was killed; taking over its lock")
                _remove_dead_lock(path, held.token)
                continue
            if alive and (not _should_wait(lock, held, resumes) or time.monotonic() > deadline):
                raise _build_locked_error(run_dir, held)
            until = (
                f"it to exit, up to {MAX_WAIT_S / 60:.0f} minutes" if alive else f"a heartbeat, up to {STALE_S:.0f} s"
            )
            if until != reported:
                log(f"note: output_dir={run_dir}: locked by {held.describe()}; waiting for {until}")
                reported = until
            time.sleep(POLL_S)
        return cls(run_dir, lock, owns=True)

    @classmethod
    def join(cls, run_dir: Path, token: str) -> "FolderLock | None":
        """Join the launcher's lock `token` as a holder; return None if the lock is not visible on this host.

        Raises FolderLostError if another run has taken over the folder.
        """
        lock = _wait_for_lock(run_dir, lambda lock: bool(lock.token))
        if lock is None:
            return None
        if lock.token != token:
            raise _build_lost_error(run_dir, lock)
        lock = replace(lock, holders=(lock.holders[0], Holder.for_current_process()))
        write_json(get_lock_path(run_dir), asdict(lock))
        return cls(run_dir, lock, owns=False)

    def check(self) -> None:
        """Raise FolderLostError if another run has taken over the folder; call this before writing to the folder."""
        if not self._ensure_held():
            raise _build_lost_error(self._run_dir, _read_lock(self._path))

    def release(self) -> None:
        """Release the lock; may be called twice."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join(timeout=HEARTBEAT_INTERVAL_S)
            # If the file server is down, the next run will see that the holders are dead.
            with suppress(OSError, UnreadableFileError):
                if self._owns and self._ensure_held():
                    self._path.unlink(missing_ok=True)

    def _ensure_held(self) -> bool:
        deadline = time.monotonic() + MAX_DELAY_S
        while self.is_held:
            held = _read_lock(self._path)
            if held is None:
                # The folder was emptied. Lock it again, unless another run has done so.
                if self._ended.is_set() or _create_lock_file(self._path, self._lock):
                    return True
            elif held.token or time.monotonic() > deadline:
                self.is_held = held.token == self.token
                break
            else:
                # The file is incomplete: another thread, another holder or another run is writing it.
                time.sleep(0.01)
        return self.is_held

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_INTERVAL_S):
            # The file server may not respond; `check` raises if another run takes over.
            with suppress(OSError, UnreadableFileError):
                if not self._ensure_held():
                    return
                os.utime(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def get_lock_path(run_dir: Path) -> Path:
    return run_dir / "logs" / LOCK_FILE


def check_not_locked(run_dir: Path, *, resumes: bool) -> None:
    """Raise UserError if a live run on this machine holds the folder.

    Does nothing if this run would wait for the lock, or if the lock cannot be read (later checks report that).
    Does not write anything.
    """
    try:
        held = _read_lock(get_lock_path(run_dir))
    except OSError:
        return  # reported by later checks
    if held is not None and held.is_alive() and not _should_wait(LockRecord.for_current_process(), held, resumes):
        raise _build_locked_error(run_dir, held)


def can_see_lock(run_dir: Path, token: str) -> bool:
    """Return whether another rank's lock is visible here, allowing for the delay of network file systems."""
    held = _wait_for_lock(run_dir, lambda lock: lock.token == token)
    return held is not None and held.token == token


def describe_live_holder(run_dir: Path) -> str | None:
    """Describe the run that holds the folder; None if no run holds it, or if the holder is known to be dead."""
    held = _read_lock(get_lock_path(run_dir))
    return None if held is None or held.is_alive() is False else held.describe()


class _HolderMonitor:
    def __init__(self) -> None:
        self._seen: tuple[str, int] | None = None
        self._has_changed = False
        self._changed_at = 0.0

    def is_alive(self, lock: LockRecord) -> bool | None:
        if (alive := lock.is_alive()) is not None:
            return alive
        now, state = time.monotonic(), (lock.token, lock.beat)
        if state != self._seen:
            self._has_changed = self._seen is not None and self._seen[0] == lock.token
            self._seen, self._changed_at = state, now
        if now - self._changed_at > STALE_S:
            return False
        return True if self._has_changed else None


def _should_wait(lock: LockRecord, held: LockRecord, resumes: bool) -> bool:
    under_scheduler = any(name in os.environ for name in (*JOB_VARIABLES, "KUBERNETES_SERVICE_HOST"))
    # An earlier attempt of the same job, terminated by the scheduler.
    is_predecessor = bool(held.job) and held.job == lock.job and held.restarts < lock.restarts
    return is_predecessor or (resumes and under_scheduler)


def _build_locked_error(run_dir: Path, lock: LockRecord) -> UserError:
    problem = f"output_dir={run_dir}: in use by another run ({lock.describe()})"
    return UserError(f"{problem}; wait until it ends, or use another folder")


def _build_lost_error(run_dir: Path, lock: LockRecord | None) -> FolderLostError:
    by = f" by {lock.describe()}" if lock else ""
    return FolderLostError(
        f"output_dir={run_dir}: taken over by another run{by}, because this run sent no heartbeat for {STALE_S:.0f} s; "
        "stopping without a save"
    )


def _create_lock_file(path: Path, lock: LockRecord) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(asdict(lock), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    except OSError:
        path.unlink(missing_ok=True)  # an empty file, from a full disk, would lock the folder
        raise
    return True


def _read_lock(path: Path) -> LockRecord | None:
    """Return the lock; None if the file does not exist.

    An incomplete or damaged lock has no holders. Raises UnreadableFileError for a folder or pipe, and OSError for file
    system errors.
    """
    if path.exists() and not path.is_file():
        raise UnreadableFileError(path, f"is a {'folder' if path.is_dir() else 'pipe or device'}", "move it away")
    try:
        # Opening the file makes network file systems query their server.
        with path.open("rb") as file:
            content, beat = file.read(), os.fstat(file.fileno()).st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return replace(parse_json(content, path, LockRecord), beat=beat)
    except UnreadableFileError:
        return LockRecord("", "", "", 0, (), beat)


def _wait_for_lock(run_dir: Path, is_wanted: Callable[[LockRecord], bool]) -> LockRecord | None:
    """Return the lock once `is_wanted` accepts it, or its state after `MAX_DELAY_S` seconds."""
    deadline = time.monotonic() + MAX_DELAY_S
    while True:
        held = _read_lock(get_lock_path(run_dir))
        if (held is not None and is_wanted(held)) or time.monotonic() > deadline:
            return held
        time.sleep(0.2)


def _remove_dead_lock(path: Path, token: str) -> None:
    """Remove the dead lock with this token, but not a new lock that has replaced it."""
    aside = path.with_name(f"{LOCK_FILE}.{secrets.token_hex(4)}")
    try:
        os.rename(path, aside)  # only one of several processes that see the same dead lock succeeds
    except FileNotFoundError:
        return
    held = _read_lock(aside)
    if held is not None and held.token != token and not path.exists():
        os.rename(aside, path)
    aside.unlink(missing_ok=True)
