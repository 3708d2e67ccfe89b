"""Copies of tensors in host memory that the device makes in passing, for a thread to write while training goes on."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch

# Page-locked memory cannot be swapped: a model that is trained whole is copied the slow way.
MOST_KEPT_BYTES = 8 * 2**30
OWN_BLOCK_BYTES = 32 * 2**20
ALIGNMENT = 512
Size = tuple[int, torch.device]
"""Bytes of a tensor, and where it lies."""


class HostCopies:
    """Buffers by name, page-locked for what is on a GPU; the copies of one save are valid until those of the next.

    A copy from a GPU stands in a stream of its own behind what was queued before it, so that neither the host nor the
    next forward and backward pass waits. What changes the tensors has to stand behind `hold_changes`.
    """

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._buffers: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._event: torch.cuda.Event | None = None
        self._is_held = True

    def reserve(self, tensors: Sequence[Size]) -> None:
        """Allocate what copies of these will take, which is tenths of a second where it is page-locked.

        From any thread, but not while another one is in `copy`.
        """
        small: dict[torch.device, int] = {}
        for size, device in tensors:
            if size >= OWN_BLOCK_BYTES:
                self._allocate(size, device)
            else:
                small[device] = small.get(device, 0) + _aligned(size)
        for device, size in small.items():
            self._allocate(size, device)

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` in host memory, contiguous; from a GPU its values are there after `wait`."""
        tensor = tensor.detach()
        buffer = self._buffer(name, tensor)
        if buffer is None:
            return tensor.to("cpu", copy=True).contiguous()
        tensor = tensor.contiguous()
        with self._behind(tensor):
            return buffer.copy_(tensor, non_blocking=True)

    def begun(self) -> None:
        """Mark that all copies of a save have been queued."""
        if self._stream is not None:
            # The thread that waits for it must not keep a core busy, or the lock of CUDA's library.
            self._event = torch.cuda.Event(blocking=True)
            self._event.record(self._stream)
            self._is_held = False

    def hold_changes(self) -> None:
        """Have what is queued after this wait until the copies are made; the host does not wait."""
        if self._event is not None and not self._is_held:
            torch.cuda.current_stream(self._event.device).wait_event(self._event)
            self._is_held = True

    def wait(self) -> None:
        """Block until the values are there; called by the thread that reads them."""
        if self._event is not None:
            self._event.synchronize()

    def _behind(self, tensor: torch.Tensor) -> "torch.cuda.StreamContext | nullcontext[None]":
        """The stream of copies, behind what makes this tensor; its memory is not given away before it was copied."""
        if tensor.device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        tensor.record_stream(self._stream)
        return torch.cuda.stream(self._stream)

    def _buffer(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """The buffer of that name; None where too much memory would be kept."""
        buffer = self._buffers.get(name)
        if buffer is not None and (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype):
            return buffer
        blocks = [block for block in self._blocks if block.has_room(tensor)]
        block = blocks[0] if blocks else self._allocate(tensor.nbytes, tensor.device)
        if block is None:
            return None
        buffer = self._buffers[name] = block.take(tensor)
        return buffer

    def _allocate(self, size: int, device: torch.device) -> "_Block | None":
        if sum(len(block.memory) for block in self._blocks) + size > MOST_KEPT_BYTES:
            return None
        if device.type == "cuda":
            with torch.cuda.device(device):  # a new thread begins at the first one
                memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        else:
            memory = torch.empty(size, dtype=torch.uint8).zero_()  # the system gives memory when it is written to
        block = _Block(memory, device)
        self._blocks.append(block)
        return block


class _Block:
    """Memory for copies of tensors of one device, taken from its beginning to its end."""

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self.memory, self.device = memory, device
        self._taken = 0

    def has_room(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's copy fits in what is left."""
        return tensor.device.type == self.device.type and self._taken + tensor.nbytes <= len(self.memory)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Room for a tensor, as one of its shape."""
        piece = self.memory.narrow(0, self._taken, tensor.nbytes)
        self._taken += _aligned(tensor.nbytes)
        return piece.view(tensor.dtype).view(tensor.shape)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
