"""Copies of tensors in host memory that the device makes in passing, for a thread to write while training goes on."""

from collections.abc import Sequence

import torch

# Page-locked memory cannot be swapped: a model that is trained whole is copied the slow way.
MOST_KEPT_BYTES = 8 * 2**30
OWN_BLOCK_BYTES = 32 * 2**20
ALIGNMENT = 512
Size = tuple[int, torch.device]
"""Bytes of a tensor, and where it lies."""


class HostCopies:
    """Buffers by name, page-locked for what is on a GPU; the copies of one save are valid until those of the next.

    A copy from a GPU stands in its stream like any kernel: what changes the tensor later in that stream does not reach
    it, and the host does not wait.
    """

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._buffers: dict[str, torch.Tensor] = {}
        self._event: torch.cuda.Event | None = None

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
        return buffer.copy_(tensor.contiguous(), non_blocking=True)

    def begun(self) -> None:
        """Mark that all copies of a save have been queued."""
        if any(block.device.type == "cuda" for block in self._blocks):
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> None:
        """Block until the values are there; called by the thread that reads them."""
        if self._event is not None:
            self._event.synchronize()

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
