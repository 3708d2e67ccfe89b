"""A run's folder that cannot be read for a while: its file server is gone, or has been mounted anew."""

import os
import time
from collections.abc import Sequence, Sized
from pathlib import Path

from launcher.supervision.stop_signals import exit_code_of_stop
from launcher.supervision.terminal import say
from trainer.contract.exit_codes import EXIT_FAILED, EXIT_OK, EXIT_USAGE

RETURN_S, STOP_S = 120.0, 5.0
"""How long a run whose ranks have ended waits for its folder; if it was told to stop."""
POLL_S = 0.5
_OF_A_START = ("launcher.log", "heartbeat-")


class FolderWatch:
    """Whether `logs` can be read and is that of this run; says when that changes."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._is_gone = False

    def is_there(self) -> bool:
        """Asked of the file server itself: what is known of a folder's attributes may be a second old."""
        problem = self._problem()
        if problem and not self._is_gone:
            say(f"the run's folder cannot be read: {problem}")
        elif self._is_gone and not problem:
            say("the run's folder can be read again")
        self._is_gone = bool(problem)
        return not problem

    def _problem(self) -> str:
        try:
            names = os.listdir(self._logs)
        except OSError as error:
            return str(error)
        # Where nothing is mounted, the thread that holds the lock makes a folder with nothing else in it.
        return "" if any(name.startswith(_OF_A_START) for name in names) else f"nothing of this run is in {self._logs}"

    def returns(self, signals: Sized) -> bool:
        """Wait for it, until another signal comes at most; whether it is there.

        What the ranks were doing and which checkpoints are whole is not known without it.
        """
        if self.is_there():
            return True
        seconds, heard = STOP_S if signals else RETURN_S, len(signals)
        say(f"the run has ended; waiting up to {seconds:.0f} s for its folder")
        deadline = time.monotonic() + seconds
        while not self.is_there():
            if len(signals) > heard:
                return False
            if time.monotonic() > deadline:
                say(
                    f"{self._logs.parent} did not come back, and why the run ended is in its logs; once it can be read "
                    "again, start the run with training.resume_from_checkpoint=auto"
                )
                return False
            time.sleep(POLL_S)
        return True


def code_without_folder(codes: Sequence[int], signals: Sequence[int]) -> int:
    """The exit code of a run of which no more is known than those of its processes, and the signals that came."""
    if not any(codes):
        return EXIT_OK
    if signals:
        return exit_code_of_stop(signals)
    return EXIT_USAGE if EXIT_USAGE in codes else EXIT_FAILED
