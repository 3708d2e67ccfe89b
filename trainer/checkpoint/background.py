"""Write checkpoints in a background thread on every rank while training continues.

Each rank writes and flushes its files, then creates a marker file. Once rank 0 sees all markers, it publishes the
folder. Until then older checkpoints are untouched, even if a process dies.
"""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from trainer.config import UserError
from trainer.contract.output_files import collect_disk_errors
from trainer.contract.rank_errors import OtherRankError
from trainer.parallel.ranks.group import Ranks, gather_objects

POLL_INTERVAL_S = 0.05
TEMP_PREFIX = ".writing-"
"""Prefix of incomplete folders."""


class SaveError(UserError):
    """Raised on all ranks if any rank could not write a checkpoint. Older checkpoints are untouched."""

    exit_code = 1


class BackgroundSave:
    """Writes this rank's checkpoint files in a thread; on rank 0 also publishes the checkpoint."""

    def __init__(
        self, folder: Path, write: Callable[[Path], None], publish: Callable[[Path], None], ranks: Ranks
    ) -> None:
        """Start a thread that calls `write(folder)` and, on rank 0 after all ranks have written, `publish(folder)`."""
        self.folder, self._write, self._publish, self._ranks = folder, write, publish, ranks
        self._written, self._all_have_written, self._has_failed = (threading.Event() for _ in range(3))
        self._failures: list[str] = []
        self._exception: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="save", daemon=True)
        self.thread.start()

    def finish(self) -> None:
        """Wait until the folder is published; a collective call.

        Raises SaveError on all ranks after a disk error. Any other exception is raised unchanged on its rank, and as
        OtherRankError on the other ranks.
        """
        self._written.wait()
        exchange_outcomes(self._failures, self._exception, self.folder, self._ranks, self._stop)
        if self._ranks.is_main:
            self._all_have_written.set()
            self.thread.join()
        exchange_outcomes(self._failures, self._exception, self.folder, self._ranks, self._stop)

    def _stop(self) -> None:
        self._has_failed.set()
        self.thread.join()

    def _run(self) -> None:
        try:
            with collect_disk_errors(self._failures, self.folder.parent):
                self._write(self.folder)
                self._get_marker_path(self._ranks.rank).touch()
            self._written.set()
            if self._ranks.is_main and not self._failures and self._wait_for_others():
                with collect_disk_errors(self._failures, self.folder.parent):
                    for rank in range(self._ranks.world_size):
                        self._get_marker_path(rank).unlink(missing_ok=True)
                    self._publish(self.folder)
        except BaseException as error:  # raised again by the main thread
            self._exception = error
        finally:
            self._written.set()

    def _wait_for_others(self) -> bool:
        while not self._all_have_written.is_set():
            if self._has_failed.is_set():
                return False
            if all(self._get_marker_path(rank).exists() for rank in range(self._ranks.world_size)):
                break
            self._has_failed.wait(POLL_INTERVAL_S)
        return not self._has_failed.is_set()

    def _get_marker_path(self, rank: int) -> Path:
        return self.folder / f".written-{rank:05d}"


def exchange_outcomes(
    failures: list[str],
    exception: BaseException | None,
    folder: Path,
    ranks: Ranks,
    stop: Callable[[], None] = lambda: None,
) -> None:
    """Exchange write errors between ranks, and raise an error on all ranks if any rank failed.

    Rank 0 first calls `stop` and deletes the folder. Raises `exception` unchanged on its rank and OtherRankError on the
    other ranks; if there are only disk errors (`failures`), raises SaveError on all ranks. A collective call.
    """
    error = f"{type(exception).__name__}: {exception}" if exception else ""
    outcomes: list[tuple[list[str], str]] = gather_objects((failures, error))
    full = [reason for reasons, _ in outcomes for reason in reasons]
    errors = [(rank, error) for rank, (_, error) in enumerate(outcomes) if error]
    if not full and not errors:
        return
    if ranks.is_main:
        stop()
        shutil.rmtree(folder, ignore_errors=True)
    if exception is not None:
        raise exception
    if errors:
        raise OtherRankError(f"rank {errors[0][0]} could not write {folder.name}: {errors[0][1]}")
    name = folder.name.removeprefix(TEMP_PREFIX)
    raise SaveError(f"{name} was not saved: {full[0]}; free some space; older checkpoints are untouched")
