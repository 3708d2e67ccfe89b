"""What this process is doing, noted by its main thread for the watchdog to read: a microsecond or two a note."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Work whose length depends on data, disk and network. In all others a rank that gets nowhere waits for another one.
LONG_PHASES = frozenset(("tokenise", "join", "load", "start engine", "restore", "save", "generate", "report"))


class Progress:
    """Step and phase of this process, and when either last changed."""

    def __init__(self) -> None:
        self.step = 0
        """The optimizer step under way, from 1; 0 before the first."""
        self.first_step = 0
        self.phases: tuple[str, ...] = ()
        """From the outermost phase to the innermost."""
        self.changed_at = time.monotonic()
        self.tell_step: Callable[[int], None] | None = None
        """Where the step is written down at once, set by the watchdog."""

    def at_step(self, step: int) -> None:
        """Optimizer step `step` begins."""
        self.step = step
        self.first_step = self.first_step or step
        self.changed_at = time.monotonic()
        if self.tell_step is not None:
            self.tell_step(step)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note that what follows is `name`, until the block ends."""
        outer = self.phases
        self.phases = (*outer, name)
        self.changed_at = time.monotonic()
        try:
            yield
        finally:
            self.phases = outer
            self.changed_at = time.monotonic()


# One for the process, as there is one main thread: passing it down to every collective would be noise.
PROGRESS = Progress()
phase = PROGRESS.phase
