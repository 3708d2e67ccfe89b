"""Break down the time from the command to the first step: every second belongs to one part.

Parts are the phases of progress.py in their order, after `command` (the launcher's own time) and `imports`; time
outside all phases is `other`.
"""

import os
import time
from collections.abc import Sequence

from trainer.contract.launcher_process import VARIABLE, ProcessMark, read_stat

FIRST_STEP = "first step"
OTHER = "other"
LEAST_SHOWN_S = 0.05


class StartTimes:
    """Seconds of every part of a start until `end`."""

    def __init__(self) -> None:
        began = _start_time(os.getpid()) or time.clock_gettime(time.CLOCK_BOOTTIME)
        launcher = ProcessMark.parse(os.environ.get(VARIABLE, ""))
        launched = _start_time(launcher.pid) if launcher is not None and launcher.is_visible() else None
        self._part, self._since = "imports", began
        self._seconds: dict[str, float] = {} if launched is None else {"command": began - launched}
        self._in_first_step = False
        self.total = 0.0

    def change(self, phases: Sequence[str]) -> None:
        """Attribute the time from now on to the outermost of `phases`."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._seconds[self._part] = self._seconds.get(self._part, 0.0) + now - self._since
        self._since = now
        self._part = FIRST_STEP if self._in_first_step else next(iter(phases), OTHER)

    def at_first_step(self) -> None:
        """Record that the first step begins."""
        if not self._in_first_step:
            self._in_first_step = True
            self.change(())

    def end(self) -> None:
        """Record that the results of the first step have been read."""
        self.change(())
        self.total = sum(self._seconds.values())

    def values(self) -> dict[str, float]:
        """Return the seconds by metric name, such as `start/load_s`."""
        named = {f"start/{part.replace(' ', '_')}_s": seconds for part, seconds in self._seconds.items()}
        return {"start/total_s": self.total} | named

    def line(self) -> str:
        """Return one line for the console."""
        parts = [f"{part} {seconds:.1f}" for part, seconds in self._seconds.items() if seconds >= LEAST_SHOWN_S]
        return f"start        {self.total:.1f} s: {', '.join(parts)}"


def _start_time(pid: int) -> float | None:
    """Return when a process of this host began, in seconds since the boot; None if it has ended."""
    fields = read_stat(pid)
    return None if fields is None else int(fields[19]) / os.sysconf("SC_CLK_TCK")
