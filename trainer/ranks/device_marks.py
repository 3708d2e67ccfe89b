"""How far this rank's GPU has come with what the rank has launched: an event whenever a phase begins.

A collective of NCCL is begun on the host of every rank long before the GPUs come to it. Where one of these does not get
there, because a kernel before it never ends, or the card has a fault, all hosts look alike: what tells is the events.
"""

import torch

KEPT = 32
"""Events, written over in turn; a host waits for its GPU in every step, and begins a few phases in each."""
PER_STEP = 1000


class DeviceMarks:
    """The events of one process; numbered PER_STEP x step + the phases that have begun in it, the same on all ranks."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._numbers = [0] * KEPT
        self._made = 0

    def note(self, step: int) -> None:
        """A phase of this optimizer step begins; from the main thread, some microseconds. Nothing without a GPU."""
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return
        at = self._made % KEPT
        if len(self._events) <= at:
            self._events.append(torch.cuda.Event())
        before = self._numbers[(at - 1) % KEPT]
        self._numbers[at] = before + 1 if before // PER_STEP == step else PER_STEP * step
        self._events[at].record()
        self._made += 1

    def reached(self) -> int | None:
        """The number of the last event that the GPU has come to; None without events. From any thread."""
        if not self._made:
            return None
        there = [number for number, event in zip(self._numbers, list(self._events), strict=False) if event.query()]
        return max(there, default=0)
