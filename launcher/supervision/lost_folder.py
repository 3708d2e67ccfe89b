"""Handle a run folder that cannot be read for a while: its file server does not answer, or was remounted."""

import os
import time
from collections.abc import Sequence, Sized
from pathlib import Path

from launcher.supervision.terminal import say
from trainer.contract.exit_codes import EXIT_FAILED, EXIT_OK, EXIT_USAGE, choose_stop_code

RETURN_S, STOP_S = 120.0, 5.0
"""How long to wait for the folder after all ranks have ended: normally, and after a signal to stop."""
POLL_S = 0.5
_RUN_PREFIXES = ("launcher.log", "heartbeat-")


class FolderWatch:
    """Watcher that reports when `logs` becomes unreadable and readable again."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._is_unreadable = False

    def is_readable(self) -> bool:
        """Return whether the folder can be listed and belongs to this run."""
        problem = self._find_problem()
        if problem and not self._is_unreadable:
            say(f"the run's folder cannot be read: {problem}")
        elif self._is_unreadable and not problem:
            say("the run's folder can be read again")
        self._is_unreadable = bool(problem)
        return not problem

    def _find_problem(self) -> str:
        try:
            names = os.listdir(self._logs)  # asks the file server; cached attributes may be a second old
        except OSError as error:
            return str(error)
        # Where nothing is mounted, the thread that holds the lock creates a folder with only the lock in it.
        return (
            "" if any(name.startswith(_RUN_PREFIXES) for name in names) else f"nothing of this run is in {self._logs}"
        )

    def wait_until_readable(self, signals: Sized) -> bool:
        """Wait until the folder is readable, at most until another signal; return whether it is.

        Without it neither the state of the ranks nor the complete checkpoints are known.
        """
        if self.is_readable():
            return True
        seconds, received = STOP_S if signals else RETURN_S, len(signals)
        say(f"the run has ended; waiting up to {seconds:.0f} s for its folder")
        deadline = time.monotonic() + seconds
        while not self.is_readable():
            if len(signals) > received:
                return False
            if time.monotonic() > deadline:
                say(
                    f"{self._logs.parent} still cannot be read, and its logs say why the run ended; once it can, start "
                    "the run with training.resume_from_checkpoint=auto"
                )
                return False
            time.sleep(POLL_S)
        return True


def exit_code_without_folder(codes: Sequence[int], signals: Sequence[int]) -> int:
    """Return a run's exit code from the exit codes of its processes and the signals received."""
    if not any(codes):
        return EXIT_OK
    if signals:
        return choose_stop_code(signals)
    return EXIT_USAGE if EXIT_USAGE in codes else EXIT_FAILED
