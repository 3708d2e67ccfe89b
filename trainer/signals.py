"""Ctrl-C and SIGTERM: save, then stop."""

import os
import signal
from types import FrameType


class StopRequest:
    """Remembers a signal until the loop can act on it.

    Before training there is nothing to save, and a signal ends the process at once; so does a second Ctrl-C.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self.training = False
        self.saved = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def __bool__(self) -> bool:
        return self.signal_number != 0

    @property
    def exit_code(self) -> int:
        """128 + signal, as a shell reports it."""
        return 128 + self.signal_number

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.saved:
            return  # the run ends by itself now; the launcher hurries the last ranks along when the first has ended
        again = self.signal_number == number == signal.SIGINT
        self.signal_number = number
        if again or not self.training:
            os._exit(self.exit_code)
