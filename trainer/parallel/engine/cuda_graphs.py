"""A value of fixed inputs, one number or a few, and its gradient in the flat adapter, recorded as two CUDA graphs.

A small step is bound by the host: it launches some thousand kernels that take the device microseconds each. A graph is
one launch. What is recorded reads and writes the same memory every time, so that inputs are copied into static tensors
before, and results out of them after; nothing in between may wait for the device or look at a value.

For autograd a recording is one function of the flat buffers: hooks on them, accumulation, loss scales and reductions
see what they always see. The gradient of the value enters the second graph where it enters the recorded backward pass,
so that the kernels, and the bits, are those of the pass that was recorded. Random numbers go on: torch advances its
generator at every playback by what the pass draws.

All recordings share one pool of memory: of one the forward and the backward graph are always played one after the
other, and then nothing of it is needed any more. cuBLAS's workspaces (32 MiB for each thread and stream on Hopper) are
in it too; those of the stream on which passes are launched are let go of, and come back with the next of these. There
is no collective in a recording, so that ranks may differ in what they have recorded.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from trainer.parallel.engine.flat_adapter import FlatAdapter

PAYS_BELOW = 0.95
"""Of the time of a pass that is launched one by one: what a recording must take at most to be kept."""
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Relative differences of gradients beyond which a recording is wrong; in 16 bits 2e-2."""
_STREAMS: dict[torch.device, torch.cuda.Stream] = {}
"""On which passes are recorded."""
_WAITS = "called a synchronizing CUDA operation"


class NotRecordable(RuntimeError):
    """Why a pass is not played back; everything is as it was before."""


class NoRoom(NotRecordable):
    """There is not enough memory for what is recorded and what is launched."""


class Recording:
    """One pass: `value()` plays it forward, `gradients()` backward."""

    def __init__(
        self, recorder: "Recorder", value: Tensor, grad_output: Tensor, graphs: "tuple[torch.cuda.CUDAGraph, ...]"
    ) -> None:
        self._recorder, self._value, self._grad_output = recorder, value, grad_output
        self._forward, self._backward = graphs
        self.launched_s = self.played_s = 0.0
        """What one pass took, forward and backward, launched kernel by kernel and played back."""

    def __call__(self) -> Tensor:
        """The value of what is in the static inputs now, differentiable in the flat buffers."""
        result: Tensor = _Played.apply(self, *self._recorder.flat.buffers)
        return result

    def value(self) -> Tensor:
        """The value; until `gradients` no other recording may be played."""
        self._recorder.played = self
        self._forward.replay()
        return self._value.clone()

    def gradients(self, grad_output: Tensor) -> list[Tensor]:
        """Of the latest `value`, for every flat buffer."""
        if self._recorder.played is not self:
            raise RuntimeError("another recording was played between forward and backward pass of this one")
        self._recorder.played = None
        self._grad_output.copy_(grad_output)
        self._backward.replay()
        return [gradient.clone() for gradient in self._recorder.gradients]


class Recorder:
    """Makes recordings over one flat adapter, in one pool of memory."""

    def __init__(self, flat: FlatAdapter, *, beside: bool = False) -> None:
        """`beside` another Recorder, with whose workspaces passes are recorded: let go of both together."""
        self.flat = flat
        self._has_workspaces = beside
        # In their place autograd sees the buffers without the engine's hooks.
        self._leaves = [buffer.detach().requires_grad_() for buffer in flat.buffers]
        device = self._leaves[0].device
        self._device = device
        self.gradients = [torch.zeros_like(leaf, requires_grad=False) for leaf in self._leaves]
        self.played: Recording | None = None
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _STREAMS.setdefault(device, torch.cuda.Stream(device))
        self._reserved = 0

    @property
    def is_current(self) -> bool:
        """False once the buffers lie elsewhere than when recording began."""
        pairs = zip(self._leaves, self.flat.buffers, strict=True)
        return all(leaf.data_ptr() == buffer.data_ptr() for leaf, buffer in pairs)

    def record(self, compute: Callable[[], Tensor], *, must_pay: bool) -> Recording:
        """Record `compute`, fp32, of the flat adapter and of static inputs, with its backward pass.

        It is run a few times first. Raises NotRecordable if it waits for the device, gives other numbers, or does not
        pay where it must; errors of CUDA and of memory as they come.
        """
        random_state = torch.cuda.get_rng_state(self._device)
        self._make_room()  # the passes below run on a stream, whose memory is its own
        graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        try:
            with self.flat.reading(self._leaves):
                self._warm_up(compute)
                torch.cuda.set_rng_state(random_state, self._device)
                wanted = self._launched(compute)
                self._make_room()
                before = torch.cuda.memory_reserved(self._device)
                with self._mended_after_failure():
                    recording = self._recorded(compute, graphs)
                self._has_workspaces = True
                self._reserved += torch.cuda.memory_reserved(self._device) - before
            torch.cuda.set_rng_state(random_state, self._device)
            self._check(recording, *wanted, must_pay=must_pay)
        finally:
            torch.cuda.set_rng_state(random_state, self._device)
        return recording

    def check_room(self) -> None:
        """NoRoom if a pass that is launched would not find as much memory as the recordings hold for theirs."""
        free, _ = torch.cuda.mem_get_info(self._device)
        free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device) - self._reserved
        if free < self._reserved:
            held, left = self._reserved / 2**20, free / 2**20
            raise NoRoom(f"recordings hold {held:.0f} MiB, and {left:.0f} MiB are left for what is launched")

    def _make_room(self) -> None:
        """What is recorded next asks for its memory anew; workspaces, too, until there are some in the pool."""
        torch.cuda.synchronize(self._device)
        if not self._has_workspaces:
            release_workspaces()
        torch.cuda.empty_cache()

    def _warm_up(self, compute: Callable[[], Tensor]) -> None:
        """Once for what is compiled, tuned or allocated in a first pass, and once to see whether it waits."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._pass(compute)
            torch.cuda.synchronize(self._device)
            with _waits_seen() as places:
                self._pass(compute)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        if places:
            raise NotRecordable(f"the forward or backward pass waits for the device ({places[0]})")

    def _launched(self, compute: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor], float]:
        """Value and gradients of a pass as ever, and the seconds it takes."""
        with torch.cuda.stream(self._stream):
            torch.cuda.synchronize(self._device)
            started = time.perf_counter()
            value, gradients = self._pass(compute)
            torch.cuda.synchronize(self._device)
        return value, gradients, time.perf_counter() - started

    def _pass(self, compute: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
        value = compute()
        return value.detach(), list(torch.autograd.grad(value, self._leaves, torch.ones_like(value)))

    def _recorded(self, compute: Callable[[], Tensor], graphs: "tuple[torch.cuda.CUDAGraph, ...]") -> Recording:
        # Other threads, such as the one that writes checkpoints, may go on with what a capture forbids.
        where: dict[str, Any] = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(graphs[0], **where):
            value = compute()
        grad_output = torch.ones(value.shape, dtype=value.dtype, device=self._device)
        with torch.cuda.graph(graphs[1], **where):
            found = torch.autograd.grad(value, self._leaves, grad_output)
            for static, gradient in zip(self.gradients, found, strict=True):
                static.copy_(gradient)
            del found, gradient
        return Recording(self, value.detach(), grad_output, graphs)

    def _check(
        self, recording: Recording, value: Tensor, gradients: Sequence[Tensor], seconds: float, *, must_pay: bool
    ) -> None:
        """Play it, hold the numbers against those of the pass as ever, and the time."""
        grad_output = torch.ones_like(value)
        found, found_gradients = recording.value(), recording.gradients(grad_output)
        torch.cuda.synchronize(self._device)
        allowed = TOLERANCE.get(gradients[0].dtype, 2e-2)
        errors = [_difference(got, wanted) for got, wanted in zip(found_gradients, gradients, strict=True)]
        # Each number of a value alone; one that is next to nothing, as K is at first, beside the largest.
        floor = 1e-4 / allowed * float(value.abs().max())
        errors += [
            abs(got - wanted) / max(abs(wanted), floor, 1e-30) if got != wanted else 0.0
            for got, wanted in zip(found.flatten().tolist(), value.flatten().tolist(), strict=True)
        ]
        for error in errors:
            if not error <= allowed:
                raise NotRecordable(f"played back it is off by {error:.2g} (allowed {allowed})")
        del found_gradients
        started = time.perf_counter()
        recording.value()
        recording.gradients(grad_output)
        torch.cuda.synchronize(self._device)
        recording.launched_s, recording.played_s = seconds, (took := time.perf_counter() - started)
        if must_pay and took > PAYS_BELOW * seconds:
            raise NotRecordable(f"it does not pay: {took * 1e3:.1f} ms played back, {seconds * 1e3:.1f} ms launched")

    @contextmanager
    def _mended_after_failure(self) -> Iterator[None]:
        """A capture that breaks off leaves torch's generator and allocator in the middle of it."""
        generator = torch.cuda.default_generators[self._device.index or 0]
        stream = torch.cuda.current_stream(self._device)
        try:
            yield
        except BaseException:
            torch.cuda.set_stream(stream)
            with suppress(Exception):
                torch.cuda.synchronize(self._device)
            with suppress(Exception):
                torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)
            with suppress(Exception):
                generator.graphsafe_set_state(generator.clone_state())
            raise


def release_workspaces() -> None:
    """Let go of those of cuBLAS; recordings that were made with them must be gone, or have them in their pool."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()


class _Played(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: Recording, *buffers: Tensor) -> Tensor:
        ctx.recording = recording
        return recording.value()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.recording.gradients(grad_output)


@contextmanager
def _waits_seen() -> Iterator[list[str]]:
    """Where the host waited for the device within the block, as file and line."""
    places: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        # A warning and no error: other threads may wait.
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)
    places += [f"{each.filename}:{each.lineno}" for each in seen if _WAITS in str(each.message)]


def _difference(got: Tensor, wanted: Tensor) -> float:
    """Root of the squared differences over that of what is wanted, in pieces."""
    pairs = list(zip(got.flatten().split(2**24), wanted.flatten().split(2**24), strict=True))
    squares = [((a.float() - b.float()).square().sum(), b.float().square().sum()) for a, b in pairs]
    error = float(torch.stack([difference for difference, _ in squares]).sum())
    size = float(torch.stack([square for _, square in squares]).sum())
    return (error / size) ** 0.5 if size else error**0.5
