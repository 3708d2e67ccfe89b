"""Record this process's step and phase for the watchdog; each update takes one or two microseconds."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainer.contract.launcher_process import LAUNCHER_VARIABLE, ProcessIdentity, read_stat

# Phases with a duration that depends on data, disk and network. In other phases, a rank stops only to wait for another.
LONG_PHASES = frozenset(("tokenise", "join", "load", "start engine", "restore", "save", "generate", "report"))
# Phase within "join" in which the ranks wait for each other at a store, which constantly takes a little CPU time.
WAITING_PHASE = "meet"

# The device continues to compute after these phases have ended on the host, so their time counts as step time.
STEP_PHASES = frozenset(("data", "backward", "optimizer step", "reduce"))


class Progress:
    def __init__(self) -> None:
        self.step = 0
        """Optimizer step, counted from 1; 0 before the first step."""
        self.first_step = 0
        self.phases: tuple[str, ...] = ()
        """Current phases, outermost first."""
        self.changed_at = time.monotonic()
        self.seconds: dict[str, float] = {}
        """Seconds spent in each completed outermost phase, except STEP_PHASES."""
        self.first_phase_at: float | None = None
        self.write_step: Callable[[int, int], None] | None = None
        """Callback that immediately writes the step and the first step; set by the watchdog."""
        self.record_device_event: Callable[[int], None] | None = None
        """Callback that records an event on the device when one of STEP_PHASES begins; set by the watchdog."""
        self._first_step_at: float | None = None
        self._start_has_ended = False

    def begin_step(self, step: int) -> None:
        self._first_step_at = self._first_step_at or time.monotonic()
        self.first_step = self.first_step or step
        self.changed_at = time.monotonic()
        self.attribute_failures_to(step)

    def attribute_failures_to(self, step: int) -> None:
        """Set the step to report on a failure, because a step's results are read from the device one step later."""
        self.step = step
        if self.write_step is not None:
            self.write_step(step, self.first_step)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the block as phase `name`. Has no effect directly inside a phase of the same name."""
        outer = self.phases
        begun = time.monotonic()
        self.first_phase_at = self.first_phase_at or begun
        self._set_phases(outer if outer[-1:] == (name,) else (*outer, name))
        if self.record_device_event is not None and name in STEP_PHASES:
            self.record_device_event(self.step)
        try:
            yield
        finally:
            self._set_phases(outer)
            if not outer and name not in STEP_PHASES:
                self.seconds[name] = self.seconds.get(name, 0.0) + self.changed_at - begun

    def _set_phases(self, phases: tuple[str, ...]) -> None:
        self.phases = phases
        self.changed_at = time.monotonic()

    def take_startup_times(self) -> dict[str, float] | None:
        """Return the seconds per part of the startup, through the first step; None after the first call.

        The parts are the launcher, the imports, the outermost phases, the first step, and the rest.
        """
        if self._start_has_ended:
            return None
        self._start_has_ended = True
        now, started = time.monotonic(), _read_start(os.getpid())
        launcher = ProcessIdentity.parse(os.environ.get(LAUNCHER_VARIABLE, ""))
        launched = _read_start(launcher.pid) if launcher is not None and launcher.is_visible() else started
        parts = {"command": started - launched} if launched < started else {}
        parts |= {"imports": self._compute_seconds_before_phases(now), **self.seconds}
        parts["first step"] = now - (self._first_step_at or now)
        parts["other"] = max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - launched - sum(parts.values()))
        return parts

    def get_seconds_by_phase(self) -> dict[str, float]:
        """Return the seconds per phase, with `start` for the time before the first phase and `steps` for the rest."""
        now = time.monotonic()
        open_for = now - self.changed_at if self.phases else 0.0
        rest = max(0.0, now - (self.first_phase_at or now) - open_for - sum(self.seconds.values()))
        return {"start": self._compute_seconds_before_phases(now), **self.seconds, "steps": rest}

    def _compute_seconds_before_phases(self, now: float) -> float:
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - _read_start(os.getpid())
        return max(0.0, age - (now - (self.first_phase_at or now)))


def _read_start(pid: int) -> float:
    """Return a process's start time in seconds since boot; the current time if it has exited."""
    fields = read_stat(pid)
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    return now if fields is None else int(fields[19]) / os.sysconf("SC_CLK_TCK")


# One instance per process, because only the main thread has phases.
PROGRESS = Progress()
phase = PROGRESS.phase
