"""What this process is doing, recorded by its main thread for the watchdog; a note takes one or two microseconds."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from trainer.parallel.ranks.start_times import StartTimes

# Work of a length that depends on data, disk and network. In all others a rank without progress waits for another one.
LONG_PHASES = frozenset(("tokenise", "join", "load", "start engine", "restore", "save", "generate", "report"))
# Within "join": the ranks wait for each other in a store, which constantly takes a little CPU time.
WAITING_PHASE = "meet"

# The device still computes after these have ended on the host: their time counts as that of the steps.
OF_A_STEP = frozenset(("data", "backward", "optimizer step", "reduce"))


class Progress:
    """Step and phase of this process, and when either last changed."""

    def __init__(self) -> None:
        self.step = 0
        """Current optimizer step, from 1; 0 before the first."""
        self.first_step = 0
        self.phases: tuple[str, ...] = ()
        """From the outermost phase to the innermost."""
        self.changed_at = time.monotonic()
        self.seconds: dict[str, float] = {}
        """Time spent in each outermost phase so far, without the steps themselves."""
        self.first_phase_at: float | None = None
        self.write_step: Callable[[int, int], None] | None = None
        """Writes the step and the first step at once; set by the watchdog."""
        self.mark_device: Callable[[int], None] | None = None
        """Marks the device's work of this step when a phase of OF_A_STEP begins; set by the watchdog."""
        self._start: StartTimes | None = StartTimes()

    def at_step(self, step: int) -> None:
        """Record that optimizer step `step` begins."""
        if self._start is not None:
            self._start.at_first_step()
        self.first_step = self.first_step or step
        self.changed_at = time.monotonic()
        self.attribute_failures_to(step)

    def attribute_failures_to(self, step: int) -> None:
        """Attribute failures from now on to step `step`: a device's results are read in the step after it."""
        self.step = step
        if self.write_step is not None:
            self.write_step(step, self.first_step)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record that the block is the phase `name`; inside a phase of that name it is the same phase."""
        outer = self.phases
        begun = time.monotonic()
        self.first_phase_at = self.first_phase_at or begun
        self._change(outer if outer[-1:] == (name,) else (*outer, name))
        if self.mark_device is not None and name in OF_A_STEP:
            self.mark_device(self.step)
        try:
            yield
        finally:
            self._change(outer)
            if not outer and name not in OF_A_STEP:
                self.seconds[name] = self.seconds.get(name, 0.0) + self.changed_at - begun

    def _change(self, phases: tuple[str, ...]) -> None:
        self.phases = phases
        self.changed_at = time.monotonic()
        if self._start is not None:
            self._start.change(phases)

    def end_start(self) -> StartTimes | None:
        """Return the times of the start, at the end of the first step; None later."""
        start, self._start = self._start, None
        if start is not None:
            start.end()
        return start

    def time_by_phase(self) -> dict[str, float]:
        """Return the seconds of this process: `start` until the first phase, each phase, and `steps` for the rest."""
        now = time.monotonic()
        first = self.first_phase_at or now
        start = max(0.0, time.time() - psutil.Process().create_time() - (now - first))
        open_for = now - self.changed_at if self.phases else 0.0
        rest = max(0.0, now - first - open_for - sum(self.seconds.values()))
        return {"start": start, **self.seconds, "steps": rest}


# One per process, as there is one main thread: passing it down to every collective would be noise.
PROGRESS = Progress()
phase = PROGRESS.phase
