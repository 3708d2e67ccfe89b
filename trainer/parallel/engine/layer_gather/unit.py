"""Implement a shard unit of per-layer ZeRO-3: tensors that one collective gathers and that are freed together.

All tensors of a unit, of any dtype, are permanent views of one byte buffer. Gathering allocates the buffer's storage,
and one all-gather fills it. Freeing releases the memory. No Parameter is replaced, and anything that autograd saved for
the backward pass (the Parameter, a view, a transpose) sees the gathered bytes again, because all share one storage, as
in FSDP (Zhao et al. 2023). Reading a unit that is not gathered crashes the process instead of returning wrong numbers.

Streams: a collective runs on the process group's own stream after earlier work on the compute stream, which then waits
for the collective. Memory is allocated and freed in the order of the compute stream.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from trainer.contract.known_versions import require
from trainer.parallel.engine.linear_layers import get_packed_state

ALIGNMENT_BYTES = 256  # as in torch's allocator
WaitContext = Callable[[], AbstractContextManager[None]]
Slot = tuple[Tensor, Callable[[Tensor], None]]  # a tensor, and a function that replaces it


class ShardedUnit:
    """Tensors that are gathered and freed together; each rank of a group stores one shard in GPU or host memory."""

    def __init__(
        self,
        name: str,
        slots: Sequence[Slot],
        device: torch.device,
        *,
        in_host_memory: bool,
        pin_memory: bool,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Shard the slots' tensors over a group (default: all ranks), and replace them with views of freed memory."""
        self.name = name
        self.waiting: WaitContext = nullcontext
        self._group = group
        is_joined = dist.is_initialized()
        self._rank, self._world = (dist.get_rank(group), dist.get_world_size(group)) if is_joined else (0, 1)
        offsets, end = [], 0
        for tensor, _ in slots:
            offsets.append(end)
            end += _round_up_bytes(tensor.nbytes)
        size = _round_up_bytes(-(-end // self._world))
        self._whole = torch.empty(size * self._world, dtype=torch.uint8, device=device)
        for (tensor, replace), offset in zip(slots, offsets, strict=True):
            view = self._whole.narrow(0, offset, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            view.copy_(tensor.detach())
            replace(view.data)  # .data has its own version counter, so autograd does not see a gather as a change
        self._storage = self._whole.untyped_storage()
        self._own_slice = self._whole.narrow(0, self._rank * size, size)
        on_host = in_host_memory and device.type == "cuda"
        # A group of one rank has nothing to gather, and never frees.
        self._is_whole = group is not None and self._world == 1 and not on_host
        self._shard = self._own_slice if self._is_whole else self._own_slice.to("cpu" if on_host else device, copy=True)
        if on_host and pin_memory:
            self._shard = self._shard.pin_memory()
        self._copies = torch.cuda.Stream(device) if on_host else None
        self._pending: Any = None  # handle of a gather that is in progress
        self.is_gathered = True
        self.free()

    @property
    def bytes_held(self) -> int:
        return self._shard.nbytes

    @property
    def bytes_gathered(self) -> int:
        return self._whole.nbytes

    def start(self) -> None:
        """Start the all-gather unless it has started; all ranks must start the units in the same order."""
        if self.is_gathered:
            return
        self.is_gathered = True
        with record_function(f"zerolora: gather {self.name}"):
            self._storage.resize_(self._whole.nbytes)
            if self._copies is None:
                self._pending = _all_gather(self._whole, self._shard, self._group)
                return
            self._copies.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._copies):
                self._own_slice.copy_(self._shard, non_blocking=True)
                if self._world == 1:
                    self._pending = self._copies.record_event()
                else:
                    self._pending = _all_gather(self._whole, self._own_slice, self._group)

    def wait(self) -> None:
        """Make the current stream (on a CPU, the calling thread) wait for the all-gather."""
        if self._pending is not None:
            with record_function(f"zerolora: wait for {self.name}"), self.waiting():
                self._pending.wait()
            self._pending = None

    def free(self) -> None:
        if self.is_gathered and not self._is_whole:
            self.wait()  # a collective must not write to memory after it is freed
            self._storage.resize_(0)
            self.is_gathered = False


def find_slots(parameter: nn.Parameter) -> Iterator[Slot]:
    """Yield the slots of a parameter and, for a 4-bit weight, of its block scales."""
    yield parameter, partial(setattr, parameter, "data")
    state = get_packed_state(parameter)
    while state is not None:
        yield state.absmax, partial(setattr, state, "absmax")
        state = state.state2 if require(state, "nested", "bitsandbytes") else None


def _all_gather(whole: Tensor, shard: Tensor, group: dist.ProcessGroup | None) -> Any:
    # torch 2.13 renamed the collective.
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    return gather(whole, shard, group=group, async_op=True)


def _round_up_bytes(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
