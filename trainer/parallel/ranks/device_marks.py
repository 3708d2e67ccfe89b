"""Track how far this rank's GPU is behind its host: an event is recorded whenever a phase of a step begins.

The host of every rank launches a collective of NCCL long before the GPUs reach it, and continues into the next step. If
one GPU never reaches it, because a kernel before it does not end or the GPU has a fault, all hosts look alike. Only the
events that the GPUs have reached show the difference.
"""

from contextlib import suppress

import torch

KEPT = 256
"""Number of reused events: a host is a step or two ahead of its GPU, and begins two phases in each micro-step."""


class DeviceMarks:
    """Events of the phases that every rank passes in the same order, numbered from 1."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._made = 0
        self._device = -1

    def note(self, step: int) -> None:
        """Record an event on the main thread when a phase of this optimizer step begins; takes a few microseconds.

        Does nothing without a GPU, or before the first step, when the rank may not have chosen its GPU.
        """
        if not step or not torch.cuda.is_initialized():
            return
        with suppress(RuntimeError):  # a failed GPU: the step is about to raise the same error
            if torch.cuda.is_current_stream_capturing():
                return
            if not self._events:
                self._device = torch.cuda.current_device()
            if torch.cuda.current_device() != self._device:
                return  # an event belongs to the GPU on which it was recorded first
            if len(self._events) < KEPT:
                self._events.append(torch.cuda.Event())
            self._events[self._made % KEPT].record()
            self._made += 1

    def reached(self) -> int | None:
        """Return the number of the last event that the GPU has reached, 0 if that event was overwritten.

        None without events. Call it from any thread on this rank's GPU.
        """
        if not self._made:
            return None
        try:
            for number in range(self._made, max(0, self._made - KEPT), -1):
                if self._events[(number - 1) % KEPT].query():
                    return number
        except RuntimeError:
            return None  # the GPU has failed, which the main thread is about to notice
        return 0
