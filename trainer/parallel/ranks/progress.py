"""What this process is doing, noted by its main thread for the watchdog to read: a microsecond or two a note."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from trainer.parallel.ranks.start_times import StartTimes

# Work whose length depends on data, disk and network. In all others a rank that gets nowhere waits for another one.
LONG_PHASES = frozenset(("tokenise", "join", "load", "start engine", "restore", "save", "generate", "report"))
# Within "join": the ranks wait for each other in a store, which takes a little of the processor all the time.
WAITING_PHASE = "meet"

# A device computes while these have ended on the host: their time is that of the steps.
OF_A_STEP = frozenset(("data", "backward", "optimizer step", "reduce"))


class Progress:
    """Step and phase of this process, and when either last changed."""

    def __init__(self) -> None:
        self.step = 0
        """The optimizer step under way, from 1; 0 before the first."""
        self.first_step = 0
        self.phases: tuple[str, ...] = ()
        """From the outermost phase to the innermost."""
        self.changed_at = time.monotonic()
        self.seconds: dict[str, float] = {}
        """Spent in each outermost phase so far, beside the steps themselves."""
        self.first_phase_at: float | None = None
        self.tell_step: Callable[[int, int], None] | None = None
        """Where the step and the first one are written down at once, set by the watchdog."""
        self.mark_device: Callable[[int], None] | None = None
        """Puts a mark into the device's work of this step, when a phase of OF_A_STEP begins; set by the watchdog."""
        self._start: StartTimes | None = StartTimes()

    def at_step(self, step: int) -> None:
        """Optimizer step `step` begins."""
        if self._start is not None:
            self._start.at_first_step()
        self.first_step = self.first_step or step
        self.changed_at = time.monotonic()
        self.fails_for(step)

    def fails_for(self, step: int) -> None:
        """What fails from now on fails for step `step`: on a device its numbers are read in the step after it."""
        self.step = step
        if self.tell_step is not None:
            self.tell_step(step, self.first_step)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note that what follows is `name`, until the block ends; within a phase of that name it is the same one."""
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
        """Where the time until now went, at the end of the first step; None later."""
        start, self._start = self._start, None
        if start is not None:
            start.end()
        return start

    def time_by_phase(self) -> dict[str, float]:
        """Seconds of this process: `start` until the first phase, each phase, and `steps`: all that is between."""
        now = time.monotonic()
        first = self.first_phase_at or now
        start = max(0.0, time.time() - psutil.Process().create_time() - (now - first))
        open_for = now - self.changed_at if self.phases else 0.0
        rest = max(0.0, now - first - open_for - sum(self.seconds.values()))
        return {"start": start, **self.seconds, "steps": rest}


# One for the process, as there is one main thread: passing it down to every collective would be noise.
PROGRESS = Progress()
phase = PROGRESS.phase
