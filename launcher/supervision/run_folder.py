"""A run's folder that cannot be read for a while: its file server is gone, or has been mounted anew."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from launcher.supervision.terminal import say

RETURN_S = 120.0
"""How long a run whose ranks have failed waits for its folder."""
POLL_S = 0.5


class RunFolder:
    """Whether `logs`, which is there from the start of the ranks on, can be read; says once that it cannot."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._has_told = False

    def is_there(self) -> bool:
        """Asked of the file server itself: what is known of a folder's attributes may be a second old."""
        try:
            os.listdir(self._logs)
        except OSError as error:
            if not self._has_told:
                say(f"the run's folder cannot be read: {error}")
            self._has_told = True
            return False
        self._has_told = False
        return True

    def returns(self, is_stopped: Callable[[], bool]) -> bool:
        """Wait for it, RETURN_S at most or until the user stops the run; whether it is there.

        What the ranks were doing and which checkpoints are whole is not known without it.
        """
        if self.is_there():
            return True
        say(f"its ranks have ended; waiting {RETURN_S:.0f} s for it")
        deadline = time.monotonic() + RETURN_S
        while not self.is_there():
            if is_stopped():
                return False
            if time.monotonic() > deadline:
                say(
                    f"{self._logs.parent} did not come back: once it can be read again, start the run with "
                    "training.resume_from_checkpoint=auto"
                )
                return False
            time.sleep(POLL_S)
        return True
