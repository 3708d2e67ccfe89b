"""One run at a time in an output folder: whoever trains there holds OUTPUT_DIR/logs/lock.json.

The file names its holders: the launcher and, once it has joined, rank 0; a rank 0 that no launcher of ours started
holds it alone. It is created with O_EXCL, which network file systems do as well. While a holder lives, a thread of it
touches the file every few seconds. Whether holders live is asked of the kernel on their own machine (process and
start); on any other machine the file's time is watched, by this machine's clock alone: unchanged for STALE_S means
dead. A holder whose lock was taken over nevertheless (it was halted, or cut off) learns it from `check`.

Here, and not in a package of the trainer, because the launcher holds it without importing torch.
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
from trainer.contract.lock_file import JOB_VARIABLES, Holder, Lock, create_lock, path_in, read_lock, remove_lock
from trainer.contract.whole_files import write_json

BEAT_S = 5.0
STALE_S = 120.0
"""Longer than a network file system hides a change (60 s), and than a library keeps Python's threads from running."""
WAIT_S = 900.0
"""How long a job that was started again waits for one that still lives."""
POLL_S = 1.0
# A network file system shows other hosts' files late.
SEEN_WITHIN_S = 30.0


class FolderLost(UserError):
    """Another run has taken the folder over: this one must not write into it any more."""

    exit_code = 1


class FolderLock:
    """The lock of a run's folder, held by this process until `release` or the end of the `with` block."""

    def __init__(self, run_dir: Path, lock: Lock, *, owns: bool) -> None:
        """Use `take` or `join`."""
        self._run_dir, self._path, self._lock, self._owns = run_dir, path_in(run_dir), lock, owns
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
        path, own, watch = path_in(run_dir), Lock.of_this_process(), _Watch()
        deadline, told = time.monotonic() + WAIT_S, ""
        while not create_lock(path, own):
            found = read_lock(path)
            if found is None:
                continue  # given back meanwhile
            alive = watch.is_alive(*found)
            if alive is False:
                say(f"note: output_dir={run_dir}: its last run ({found[0].told()}) was killed; taking its lock over")
                remove_lock(path, found[0].token)
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
        path, deadline = path_in(run_dir), time.monotonic() + SEEN_WITHIN_S
        while (found := read_lock(path)) is None or not found[0].token:  # not there, or half written
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        if found is None:
            return None
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
            found = read_lock(self._path)
            raise _lost(self._run_dir, found[0] if found else None)

    def release(self) -> None:
        """Give the folder back; may be called twice."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join(timeout=BEAT_S)
            # Where a file server is gone, who comes next sees that the holders are dead.
            with suppress(OSError, UnreadableFile):
                if self._owns and self._look():
                    self._path.unlink(missing_ok=True)

    def _look(self) -> bool:
        deadline = time.monotonic() + SEEN_WITHIN_S
        while not self._is_lost:
            found = read_lock(self._path)
            if found is None:
                # Somebody has emptied the folder. It is ours unless another run comes first.
                if self._ended.is_set() or create_lock(self._path, self._lock):
                    return True
            elif found[0].token or time.monotonic() > deadline:
                self._is_lost = found[0].token != self.token
                break
            else:
                # Half written, by the other holder or thread of this run, or by another run.
                time.sleep(0.01)
        return not self._is_lost

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                if not self._look():
                    return
                os.utime(self._path)
            except (OSError, UnreadableFile):
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
        found = read_lock(path_in(run_dir))
    except OSError:
        return  # what is wrong with the path is told by the checks that follow
    if found is None or not any(holder.is_alive() for holder in found[0].holders):
        return
    if not found[0].is_predecessor_of(Lock.of_this_process()) and not (resumes and _under_scheduler()):
        raise _held(run_dir, found[0])


def is_seen(run_dir: Path, token: str) -> bool:
    """Whether the lock that another rank holds there can be read here; a network file system may take its time."""
    path, deadline = path_in(run_dir), time.monotonic() + SEEN_WITHIN_S
    while (found := read_lock(path)) is None or found[0].token != token:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def living_holder(run_dir: Path) -> str | None:
    """The run that is in the folder, in words; None if there is none that lives on this machine, or may elsewhere."""
    found = read_lock(path_in(run_dir))
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
