"""How far this rank's GPU has come with what its host has launched: an event whenever a phase of a step begins.

A collective of NCCL is begun on the host of every rank long before the GPUs come to it, and the hosts run on into the
next step. Where one GPU does not get there, because a kernel before it never ends, or the card has a fault, all hosts
look alike: what tells is which events the GPUs have come to.
"""

from contextlib import suppress

import torch

KEPT = 256
"""Events, recorded in turn: a host is a step or two ahead of its GPU, and begins two phases in each micro-step."""


class DeviceMarks:
    """Events of the phases that every rank goes through in the same order, numbered from 1."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._made = 0
        self._device = -1

    def note(self, step: int) -> None:
        """Such a phase of this optimizer step begins; from the main thread, a few microseconds.

        Nothing without a GPU, nor before the first step, when the rank may not yet be on its own.
        """
        if not step or not torch.cuda.is_initialized():
            return
        with suppress(RuntimeError):  # of the card: the step is about to hear of it, and says where
            if torch.cuda.is_current_stream_capturing():
                return
            if not self._events:
                self._device = torch.cuda.current_device()
            if torch.cuda.current_device() != self._device:
                return  # an event belongs to the card on which it was recorded first
            if len(self._events) < KEPT:
                self._events.append(torch.cuda.Event())
            self._events[self._made % KEPT].record()
            self._made += 1

    def reached(self) -> int | None:
        """The number of the last event that the GPU has come to, 0 if it is one of those written over.

        None without events. From any thread that is on this rank's card, while the main thread waits.
        """
        if not self._made:
            return None
        try:
            for number in range(self._made, max(0, self._made - KEPT), -1):
                if self._events[(number - 1) % KEPT].query():
                    return number
        except RuntimeError:
            return None  # the card has failed, which the main thread is about to hear
        return 0
