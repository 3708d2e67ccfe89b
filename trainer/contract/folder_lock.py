"""One run at a time in an output folder: whoever trains there holds OUTPUT_DIR/logs/lock.json.

The file names its holders: the launcher and, once it has joined, rank 0; a rank 0 that no launcher of ours started
holds it alone. It is created with O_EXCL, which network file systems do as well. While a holder lives, a thread of it
touches the file every few seconds. Whether holders live is asked of the kernel on their own machine (process and
start); on any other machine the file's time is watched, by this machine's clock alone: unchanged for STALE_S means
dead. A holder whose lock was taken over nevertheless (it was halted, or cut off) learns it from `check`.

Here, and not in a package of the trainer, because the launcher holds it without importing torch.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from trainer.config.errors import UserError
from trainer.contract.whole_files import write_json

LOCK_FILE = "lock.json"
BEAT_S = 5.0
STALE_S = 120.0
"""Longer than a network file system hides a change (60 s), and than a library keeps Python's threads from running."""
WAIT_S = 900.0
"""How long a job that was started again waits for one that still lives."""
POLL_S = 1.0
# A network file system shows other hosts' files late.
SEEN_WITHIN_S = 30.0
JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


class FolderLost(UserError):
    """Another run has taken the folder over: this one must not write into it any more."""

    exit_code = 1


@dataclass(frozen=True)
class Holder:
    """A process that holds a lock."""

    host: str
    machine: str
    """Different wherever process numbers mean something else: another host, another boot, another container."""
    pid: int
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


class FolderLock:
    """The lock of a run's folder, held by this process until `release` or the end of the `with` block."""

    def __init__(self, run_dir: Path, lock: Lock, *, owns: bool) -> None:
        """Use `take` or `join`."""
        self._run_dir, self._path, self._lock, self._owns = run_dir, _path_in(run_dir), lock, owns
        self._is_lost = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="folder lock", daemon=True)
        self._thread.start()

    @classmethod
    def take(cls, run_dir: Path, *, resumes: bool, say: Callable[[str], None]) -> "FolderLock":
        """Hold the folder, which is made if it is not there.

        A lock whose holders are dead is taken over. One that is held is waited for if it belongs to an earlier start of
        this job, or if this is a job that goes on from whatever it finds (`resumes`). Raises UserError if that does not
        end.
        """
        path, own, watch = _path_in(run_dir), Lock.of_this_process(), _Watch()
        deadline, told = time.monotonic() + WAIT_S, ""
        while not _create(path, own):
            found = _read(path)
            if found is None:
                continue  # given back meanwhile
            alive = watch.is_alive(*found)
            if alive is False:
                say(f"note: output_dir={run_dir}: its last run ({found[0].told()}) was killed; taking its lock over")
                _remove(path, found[0].token)
                continue
            waits = found[0].is_predecessor_of(own) or (resumes and _under_scheduler())
            if alive and (not waits or time.monotonic() > deadline):
                raise _held(run_dir, found[0])
            until = f"its end, {WAIT_S / 60:.0f} minutes at most" if alive else f"a sign of life, {STALE_S:.0f} s"
            if until != told:
                say(f"note: output_dir={run_dir}: held by {found[0].told()}; waiting for {until}")
                told = until
            time.sleep(POLL_S)
        return cls(run_dir, own, owns=True)

    @classmethod
    def join(cls, run_dir: Path, token: str) -> "FolderLock | None":
        """Hold the lock `token` of the launcher together with it; None if its folder is not seen on this host.

        Raises FolderLost if another run has the folder by now.
        """
        path, deadline = _path_in(run_dir), time.monotonic() + SEEN_WITHIN_S
        while (found := _read(path)) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.2)
        lock = found[0]
        if lock.token != token:
            raise _lost(run_dir, lock)
        lock = replace(lock, holders=(lock.holders[0], Holder.of_this_process()))
        write_json(path, asdict(lock))
        return cls(run_dir, lock, owns=False)

    @property
    def token(self) -> str:
        """What a rank needs to join."""
        return self._lock.token

    @property
    def is_held(self) -> bool:
        """Whether the folder is this run's still, as far as it is known; `check` looks."""
        return not self._is_lost

    def check(self) -> None:
        """Raise FolderLost if another run has taken the folder over; called before anything is written there."""
        if not self._look():
            found = _read(self._path)
            raise _lost(self._run_dir, found[0] if found else None)

    def release(self) -> None:
        """Give the folder back; may be called twice."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join(timeout=BEAT_S)
            if self._owns and self._look():
                self._path.unlink(missing_ok=True)

    def _look(self) -> bool:
        found = None if self._is_lost else _read(self._path)
        if found is None and not self._is_lost:
            # Somebody has emptied the folder. It is ours unless another run came first.
            return _create(self._path, self._lock) or self._look()
        self._is_lost = found is None or found[0].token != self.token
        return not self._is_lost

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                if not self._look():
                    return
                os.utime(self._path)
            except OSError:
                continue  # a file server that does not answer now; should others wait in vain, `check` says it

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def refuse_if_held(run_dir: Path, *, resumes: bool) -> None:
    """Raise UserError at once where `take` would: a run of this machine is in the folder. Nothing is written."""
    try:
        found = _read(_path_in(run_dir))
    except OSError:
        return  # what is wrong with the path is told by the checks that follow
    if found is None or not any(holder.is_alive() for holder in found[0].holders):
        return
    if not found[0].is_predecessor_of(Lock.of_this_process()) and not (resumes and _under_scheduler()):
        raise _held(run_dir, found[0])


def is_seen(run_dir: Path, token: str) -> bool:
    """Whether the lock that another rank holds there can be read here; a network file system may take its time."""
    path, deadline = _path_in(run_dir), time.monotonic() + SEEN_WITHIN_S
    while (found := _read(path)) is None or found[0].token != token:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def living_holder(run_dir: Path) -> str | None:
    """The run that is in the folder, in words; None if there is none that lives on this machine, or may elsewhere."""
    found = _read(_path_in(run_dir))
    dead = found is None or (found[0].holders and all(holder.is_alive() is False for holder in found[0].holders))
    return None if found is None or dead else found[0].told()


class _Watch:
    """Whether the holders of a lock live, as far as it can be seen from here."""

    def __init__(self) -> None:
        self._seen: tuple[str, int] | None = None
        self._changes = 0
        self._changed_at = 0.0

    def is_alive(self, lock: Lock, beat: int) -> bool | None:
        """None as long as it is not known."""
        states = [holder.is_alive() for holder in lock.holders]
        if any(states):
            return True
        if states and None not in states:
            return False
        now, sign = time.monotonic(), (lock.token, beat)
        if sign != self._seen:
            same_lock = self._seen is not None and self._seen[0] == lock.token
            self._changes = self._changes + 1 if same_lock else 0
            self._seen, self._changed_at = sign, now
        if now - self._changed_at > STALE_S:
            return False
        return True if self._changes else None


def _path_in(run_dir: Path) -> Path:
    return run_dir / "logs" / LOCK_FILE


def _create(path: Path, lock: Lock) -> bool:
    """Make the file with this content, and its folder; False if there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(json.dumps(asdict(lock), indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return True


def _read(path: Path) -> tuple[Lock, int] | None:
    """The lock and the time of its last beat; None if there is none. One that is half written has no holders."""
    try:
        # Opened anew for every look: that is when network file systems ask their server.
        with path.open(encoding="utf-8") as file:
            text, beat = file.read(), os.fstat(file.fileno()).st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        values = json.loads(text)
        holders = tuple(Holder(**holder) for holder in values.pop("holders"))
        return Lock(**values, holders=holders), beat
    except (ValueError, TypeError, KeyError, AttributeError):
        return Lock("", "", "", 0, ()), beat


def _remove(path: Path, token: str) -> None:
    """Remove the dead lock `token`, and no other that has come in its place."""
    aside = path.with_name(f"{LOCK_FILE}.{secrets.token_hex(4)}")
    try:
        os.rename(path, aside)  # of several that see the same dead lock one succeeds
    except FileNotFoundError:
        return
    found = _read(aside)
    if found is not None and found[0].token != token and not path.exists():
        os.rename(aside, path)
    aside.unlink(missing_ok=True)


def _held(run_dir: Path, lock: Lock) -> UserError:
    return UserError(
        f"output_dir={run_dir}: another run is in this folder, {lock.told()}; wait for its end, or name another folder"
    )


def _lost(run_dir: Path, lock: Lock | None) -> FolderLost:
    by = f" by {lock.told()}" if lock else ""
    return FolderLost(
        f"output_dir={run_dir}: taken over by another run{by}, for this one gave no sign of life for {STALE_S:.0f} s; "
        "it ends here and writes nothing more"
    )


def _under_scheduler() -> bool:
    return any(name in os.environ for name in (*JOB_VARIABLES, "KUBERNETES_SERVICE_HOST"))


def _machine() -> str:
    """Host, boot and process namespace."""
    parts = [socket.gethostname()]
    try:
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        pass  # not Linux: the name has to do
    return " ".join(parts)


def _start_of(pid: int) -> int | None:
    """When a process started, in ticks since boot; -1 for one that has ended and is not collected yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return -1 if fields[0] in "ZX" else int(fields[19])
