"""Whether this rank's GPU has come to where its host is: an event, recorded anew whenever a phase of a step begins.

A collective of NCCL is begun on the host of every rank long before the GPUs come to it. Where one of these does not get
there, because a kernel before it never ends, or the card has a fault, all hosts look alike: what tells is the event.
"""

from contextlib import suppress

import torch


class DeviceMark:
    """The latest begin of a phase, in the order of what the process has launched."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        self._device = -1

    def note(self, step: int) -> None:
        """A phase of this optimizer step begins; from the main thread, a few microseconds.

        Nothing without a GPU, nor before the first step, when the rank may not yet be on its own.
        """
        if not step or not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return
        if self._event is None:
            self._event, self._device = torch.cuda.Event(), torch.cuda.current_device()
        if torch.cuda.current_device() != self._device:
            return  # an event belongs to the card on which it was recorded first
        with suppress(RuntimeError):  # of the card: the step is about to hear of it, and says where
            self._event.record()

    def is_ahead(self) -> bool:
        """Whether the GPU has not come there yet. From any thread that is on this rank's card."""
        try:
            return self._event is not None and not self._event.query()
        except RuntimeError:
            return False  # the card has failed, which the main thread is about to hear
