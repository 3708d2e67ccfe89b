"""Copy tensors to host memory asynchronously, so that a thread can write them while training continues."""

from contextlib import nullcontext

import torch

# Pinned memory cannot be swapped, so tensors beyond this limit (full fine-tuning) are copied synchronously.
MAX_PINNED_BYTES = 8 * 2**30


class HostCopies:
    """Copies tensors to named host buffers, which are valid until the next save.

    Copies from a GPU go to pinned memory, in a separate stream after the work queued so far, so that neither the host
    nor the next forward and backward pass waits for them. Call `make_updates_wait` before queueing work that changes
    the tensors.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._event: torch.cuda.Event | None = None
        self._updates_wait = True

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of a tensor in host memory. For a GPU tensor, the copy is valid after `wait`."""
        tensor = tensor.detach()
        buffer = self._get_buffer(name, tensor)
        if buffer is None:
            return tensor.to("cpu", copy=True).contiguous()
        tensor = tensor.contiguous()
        with self._use_copy_stream(tensor):
            return buffer.copy_(tensor, non_blocking=True)

    def record_event(self) -> None:
        if self._stream is not None:
            # Blocking, so that the waiting thread neither spins nor holds the CUDA driver's lock.
            self._event = torch.cuda.Event(blocking=True)
            self._event.record(self._stream)
            self._updates_wait = False

    def make_updates_wait(self) -> None:
        """Make work queued after this call wait for the copies, without blocking the host."""
        if self._event is not None and not self._updates_wait:
            torch.cuda.current_stream(self._event.device).wait_event(self._event)
            self._updates_wait = True

    def wait(self) -> None:
        """Block until the copies are complete; called by the thread that reads them."""
        if self._event is not None:
            self._event.synchronize()

    def _use_copy_stream(self, tensor: torch.Tensor) -> "torch.cuda.StreamContext | nullcontext[None]":
        """Return a context in which copies of the tensor are queued on the copy stream.

        The copy stream waits for the current stream. The tensor's memory is not reused before the copy is complete.
        """
        if tensor.device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        tensor.record_stream(self._stream)
        return torch.cuda.stream(self._stream)

    def _get_buffer(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the buffer for a tensor, or None if the buffers would exceed MAX_PINNED_BYTES."""
        buffer = self._buffers.get(name)
        if buffer is not None and (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype):
            return buffer
        if sum(other.nbytes for other in self._buffers.values()) + tensor.nbytes > MAX_PINNED_BYTES:
            return None
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._buffers[name] = buffer
        return buffer
