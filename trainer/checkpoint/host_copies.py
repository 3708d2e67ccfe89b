"""Copies of tensors in host memory that the device makes in passing, for a thread to write while training goes on."""

import torch

# Page-locked memory cannot be swapped: a model that is trained whole is copied the slow way.
MOST_PINNED_BYTES = 8 * 2**30


class HostCopies:
    """Page-locked buffers by name, allocated once; the copies of one save are valid until those of the next are begun.

    A copy from a GPU stands in its stream like any kernel: what changes the tensor later in that stream does not reach
    it, and the host does not wait.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._pinned_bytes = 0
        self._event: torch.cuda.Event | None = None

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` in host memory, contiguous; from a GPU its values are there after `wait`."""
        tensor = tensor.detach()
        if tensor.device.type != "cuda":
            return tensor.to("cpu", copy=True).contiguous()
        buffer = self._buffer(name, tensor)
        if buffer is None:
            return tensor.to("cpu", copy=True).contiguous()
        return buffer.copy_(tensor.contiguous(), non_blocking=True)

    def begun(self) -> None:
        """Mark that all copies of a save have been queued."""
        if self._buffers:
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> None:
        """Block until the values are there; called by the thread that reads them."""
        if self._event is not None:
            self._event.synchronize()

    def _buffer(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """The buffer of that name; None where there would be too much page-locked memory."""
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            if self._pinned_bytes + tensor.nbytes > MOST_PINNED_BYTES:
                return None
            self._pinned_bytes += tensor.nbytes
            buffer = self._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return buffer
