"""The lock of an output folder, OUTPUT_DIR/logs/lock.json, which allows one run at a time.

The file names its holders: the launcher and, once it has joined, rank 0; without our launcher, rank 0 alone. It is
created with O_EXCL, which also works on network file systems. While a holder is alive, a thread of it touches the file
every few seconds. On the same machine, holders are identified by process and start time; on other machines, the file's
time is watched with the local clock only, and no change for STALE_S means dead. A holder that has lost its lock
nevertheless (because it was stopped or disconnected) gets FolderLost from `check`.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from trainer.config.errors import UserError
from trainer.config.files import UnreadableFile
from trainer.contract.lock_file import JOB_VARIABLES, Holder, Lock, create_lock, lock_path, read_lock, remove_lock
from trainer.contract.whole_files import write_json

BEAT_S = 5.0
STALE_S = 120.0
"""Longer than network file systems cache attributes (60 s) and than libraries block Python threads."""
WAIT_S = 900.0
"""How long a restarted job waits for an earlier one that is still alive."""
POLL_S = 1.0
# Network file systems show files of other hosts with a delay.
SEEN_WITHIN_S = 30.0


class FolderLost(UserError):
    """Another run has taken over the folder: this one must not write to it any more."""

    exit_code = 1


class FolderLock:
    """The lock of a run's folder, held by this process until `release` or the end of the `with` block."""

    def __init__(self, run_dir: Path, lock: Lock, *, owns: bool) -> None:
        self._run_dir, self._path, self._lock, self._owns = run_dir, lock_path(run_dir), lock, owns
        self._is_lost = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="folder lock", daemon=True)
        self._thread.start()

    @classmethod
    def take(cls, run_dir: Path, *, resumes: bool, say: Callable[[str], None]) -> "FolderLock":
        """Lock the folder, which is created if it does not exist.

        A lock of dead holders is taken over. If the holder is alive, this waits if it is an earlier start of this job,
        or if this job resumes from whatever it finds (`resumes`). Raises UserError if the folder stays locked.
        """
        path, own, watch = lock_path(run_dir), Lock.for_this_process(), _Watch()
        deadline, reported = time.monotonic() + WAIT_S, ""
        while not create_lock(path, own):
            found = read_lock(path)
            if found is None:
                continue  # released in the meantime
            alive = watch.is_alive(*found)
            if alive is False:
                say(
                    f"note: output_dir={run_dir}: its last run ({found[0].describe()}) was killed; taking over its lock"
                )
                remove_lock(path, found[0].token)
                continue
            waits = found[0].is_predecessor_of(own) or (resumes and _under_scheduler())
            if alive and (not waits or time.monotonic() > deadline):
                raise _locked_error(run_dir, found[0])
            until = f"its end, {WAIT_S / 60:.0f} minutes at most" if alive else f"a heartbeat, {STALE_S:.0f} s"
            if until != reported:
                say(f"note: output_dir={run_dir}: held by {found[0].describe()}; waiting for {until}")
                reported = until
            time.sleep(POLL_S)
        return cls(run_dir, own, owns=True)

    @classmethod
    def join(cls, run_dir: Path, token: str) -> "FolderLock | None":
        """Join the launcher as a holder of the lock `token`; None if its folder is not visible on this host.

        Raises FolderLost if another run has taken over the folder.
        """
        path, deadline = lock_path(run_dir), time.monotonic() + SEEN_WITHIN_S
        while (found := read_lock(path)) is None or not found[0].token:  # missing or half written
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        if found is None:
            return None
        lock = found[0]
        if lock.token != token:
            raise _lost_error(run_dir, lock)
        lock = replace(lock, holders=(lock.holders[0], Holder.for_this_process()))
        write_json(path, asdict(lock))
        return cls(run_dir, lock, owns=False)

    @property
    def token(self) -> str:
        """Token with which a rank can join."""
        return self._lock.token

    @property
    def is_held(self) -> bool:
        """Whether this run still held the lock at the last check."""
        return not self._is_lost

    def check(self) -> None:
        """Raise FolderLost if another run has taken over the folder; call this before writing to it."""
        if not self._still_holds():
            found = read_lock(self._path)
            raise _lost_error(self._run_dir, found[0] if found else None)

    def release(self) -> None:
        """Release the lock; may be called twice."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join(timeout=BEAT_S)
            # If the file server is down, the next run will see that the holders are dead.
            with suppress(OSError, UnreadableFile):
                if self._owns and self._still_holds():
                    self._path.unlink(missing_ok=True)

    def _still_holds(self) -> bool:
        deadline = time.monotonic() + SEEN_WITHIN_S
        while not self._is_lost:
            found = read_lock(self._path)
            if found is None:
                # The folder was emptied. It is ours unless another run locks it first.
                if self._ended.is_set() or create_lock(self._path, self._lock):
                    return True
            elif found[0].token or time.monotonic() > deadline:
                self._is_lost = found[0].token != self.token
                break
            else:
                # Half written by this run's other holder or thread, or by another run.
                time.sleep(0.01)
        return not self._is_lost

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                if not self._still_holds():
                    return
                os.utime(self._path)
            except (OSError, UnreadableFile):
                continue  # a file server that does not answer now; if another run takes over, `check` raises

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def refuse_if_held(run_dir: Path, *, resumes: bool) -> None:
    """Raise UserError immediately if a live run of this machine holds the folder; nothing is written."""
    try:
        found = read_lock(lock_path(run_dir))
    except OSError:
        return  # later checks report problems of the path
    if found is None or not any(holder.is_alive() for holder in found[0].holders):
        return
    if not found[0].is_predecessor_of(Lock.for_this_process()) and not (resumes and _under_scheduler()):
        raise _locked_error(run_dir, found[0])


def can_see_lock(run_dir: Path, token: str) -> bool:
    """Return whether another rank's lock can be read here, waiting for delays of network file systems."""
    path, deadline = lock_path(run_dir), time.monotonic() + SEEN_WITHIN_S
    while (found := read_lock(path)) is None or found[0].token != token:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def describe_live_holder(run_dir: Path) -> str | None:
    """Describe the run that holds the folder; None if there is none or it is known to be dead."""
    found = read_lock(lock_path(run_dir))
    dead = found is None or (found[0].holders and all(holder.is_alive() is False for holder in found[0].holders))
    return None if found is None or dead else found[0].describe()


class _Watch:
    """Detects whether the holders of a lock are alive."""

    def __init__(self) -> None:
        self._seen: tuple[str, int] | None = None
        self._changes = 0
        self._changed_at = 0.0

    def is_alive(self, lock: Lock, beat: int) -> bool | None:
        """Return whether a holder is alive, None as long as this is unknown."""
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


def _locked_error(run_dir: Path, lock: Lock) -> UserError:
    return UserError(
        f"output_dir={run_dir}: another run uses this folder, {lock.describe()}; wait for its end, or use another one"
    )


def _lost_error(run_dir: Path, lock: Lock | None) -> FolderLost:
    by = f" by {lock.describe()}" if lock else ""
    return FolderLost(
        f"output_dir={run_dir}: taken over by another run{by}, because this one had no heartbeat for {STALE_S:.0f} s; "
        "it stops without writing anything"
    )


def _under_scheduler() -> bool:
    return any(name in os.environ for name in (*JOB_VARIABLES, "KUBERNETES_SERVICE_HOST"))
