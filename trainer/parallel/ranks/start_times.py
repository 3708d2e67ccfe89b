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
    """Wall-clock and CPU seconds of every part of a start until `end`."""

    def __init__(self) -> None:
        began = _start_time(os.getpid()) or time.clock_gettime(time.CLOCK_BOOTTIME)
        launcher = ProcessMark.parse(os.environ.get(VARIABLE, ""))
        self._launched = _start_time(launcher.pid) if launcher is not None and launcher.is_visible() else None
        self._part: tuple[str, ...] = ("imports",)
        self._since, self._cpu = began, 0.0
        self._of_part: dict[tuple[str, ...], tuple[float, float]] = {}
        if self._launched is not None:
            self._of_part["command",] = (began - self._launched, 0.0)
        self._in_first_step = False
        self.total = 0.0

    def change(self, phases: Sequence[str]) -> None:
        """Attribute the time from now on to the innermost of `phases`."""
        now, cpu = time.clock_gettime(time.CLOCK_BOOTTIME), time.process_time()
        seconds, busy = self._of_part.get(self._part, (0.0, 0.0))
        self._of_part[self._part] = (seconds + now - self._since, busy + cpu - self._cpu)
        self._since, self._cpu = now, cpu
        self._part = (FIRST_STEP, *phases) if self._in_first_step else tuple(phases) or (OTHER,)

    def at_first_step(self) -> None:
        """Record that the first step begins."""
        if not self._in_first_step:
            self._in_first_step = True
            self.change(())

    def end(self) -> None:
        """Record that the results of the first step have been read."""
        self.change(())
        self.total = sum(seconds for seconds, _ in self._of_part.values())

    def values(self) -> dict[str, float]:
        """Return the seconds by metric name, such as `start/load_s`."""
        named = {f"start/{part.replace(' ', '_')}_s": seconds for part, (seconds, _) in self._parts().items()}
        return {"start/total_s": self.total} | named

    def line(self) -> str:
        """Return one line for the console."""
        parts = [(part, seconds) for part, (seconds, _) in self._parts().items() if seconds >= LEAST_SHOWN_S]
        return f"start        {self.total:.1f} s: " + ", ".join(f"{part} {seconds:.1f}" for part, seconds in parts)

    def table(self) -> list[str]:
        """Return a line for every part and its inner phases, with wall-clock and CPU seconds."""
        lines = [f"{'start':<34}{'s':>7}{'cpu s':>8}"]
        for part, total in self._parts().items():
            within = [(path, found) for path, found in self._of_part.items() if path[0] == part]
            lines.append(_row(part, total))
            if len(within) > 1:
                lines += [
                    _row("  " * len(path[1:]) + (path[-1] if path[1:] else "  itself"), of) for path, of in within
                ]
        return [*lines, f"{'from the command to the first step':<34}{self.total:7.2f}"]

    def _parts(self) -> dict[str, tuple[float, float]]:
        """Return the outermost parts, including their inner phases."""
        found: dict[str, tuple[float, float]] = {}
        for path, (seconds, busy) in self._of_part.items():
            before = found.get(path[0], (0.0, 0.0))
            found[path[0]] = (before[0] + seconds, before[1] + busy)
        return found


def _row(name: str, times: tuple[float, float]) -> str:
    return f"{name:<34}{times[0]:7.2f}{times[1]:8.2f}"


def _start_time(pid: int) -> float | None:
    """Return when a process of this host began, in seconds since the boot; None if it has ended."""
    fields = read_stat(pid)
    return None if fields is None else int(fields[19]) / os.sysconf("SC_CLK_TCK")
