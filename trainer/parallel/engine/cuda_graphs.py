"""Capture a number that is computed from fixed inputs and its gradient in the flat adapter as two CUDA graphs.

A small step is bound by the host: it launches a few thousand kernels that take the device microseconds each. A graph is
one launch. A graph reads and writes the same memory every time, so inputs are copied into static tensors before, and
results out of them after; nothing in between may wait for the device or read a value.

For autograd a captured pass is one function of the flat buffers, so hooks on them, accumulation, loss scales and
reductions work as usual. The gradient of the value enters the second graph where it enters the captured backward pass,
so the kernels and the bits are those of the captured pass. Random numbers continue: torch advances its generator at
every replay by the numbers that the pass draws.

All graphs share one memory pool: the forward and the backward graph of a pass are always replayed one after the other,
and then none of its memory is needed any more. cuBLAS's workspaces (32 MiB per thread and stream on Hopper) are in the
pool too; those of the stream of launched passes are freed, and allocated again by the next launched pass. Graphs
contain no collectives, so ranks may capture different passes.
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
"""A graph is kept if a replay takes at most this fraction of the time of a launched pass."""
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Largest allowed relative difference of a graph's gradients; in 16 bits 2e-2."""
_STREAMS: dict[torch.device, torch.cuda.Stream] = {}
"""Streams for captures."""
_WAITS = "called a synchronizing CUDA operation"


class NotCapturable(RuntimeError):
    """A pass cannot be captured; nothing has changed."""


class CapturedPass:
    """One captured pass: `value()` replays its forward, `gradients()` its backward."""

    def __init__(
        self, capturer: "GraphCapturer", value: Tensor, grad_output: Tensor, graphs: "tuple[torch.cuda.CUDAGraph, ...]"
    ) -> None:
        self._capturer, self._value, self._grad_output = capturer, value, grad_output
        self._forward, self._backward = graphs
        self.launched_s = self.replayed_s = 0.0
        """Seconds of one pass, forward and backward, launched and replayed."""

    def __call__(self) -> Tensor:
        """Return the value for the current static inputs, differentiable in the flat buffers."""
        result: Tensor = _Replay.apply(self, *self._capturer.flat.buffers)
        return result

    def replay_forward(self) -> Tensor:
        """Return the value; no other pass may be replayed before `gradients`."""
        self._capturer.replaying = self
        self._forward.replay()
        return self._value.clone()

    def replay_backward(self, grad_output: Tensor) -> list[Tensor]:
        """Return the gradients of the latest `value` in every flat buffer."""
        if self._capturer.replaying is not self:
            raise RuntimeError("another graph was replayed between forward and backward pass of this one")
        self._capturer.replaying = None
        self._grad_output.copy_(grad_output)
        self._backward.replay()
        return [gradient.clone() for gradient in self._capturer.gradients]


class GraphCapturer:
    """Captures passes over one flat adapter in one memory pool."""

    def __init__(self, flat: FlatAdapter) -> None:
        self.flat = flat
        self._has_workspaces = False
        # Autograd sees these instead of the buffers, without the engine's hooks.
        self._leaves = [buffer.detach().requires_grad_() for buffer in flat.buffers]
        device = self._leaves[0].device
        self._device = device
        self.gradients = [torch.zeros_like(leaf, requires_grad=False) for leaf in self._leaves]
        self.replaying: CapturedPass | None = None
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _STREAMS.setdefault(device, torch.cuda.Stream(device))
        self._reserved = 0

    @property
    def is_current(self) -> bool:
        """Whether the buffers are still at the addresses of the captures."""
        pairs = zip(self._leaves, self.flat.buffers, strict=True)
        return all(leaf.data_ptr() == buffer.data_ptr() for leaf, buffer in pairs)

    def capture(self, compute: Callable[[], Tensor], *, must_pay: bool) -> CapturedPass:
        """Capture `compute` and its backward pass, after a few warm-up runs.

        `compute` depends only on the flat adapter and on static inputs, and returns fp32. Raises NotCapturable
        if it waits for the device, if the replay differs from a normal run or, with `must_pay`, is not faster. CUDA
        and out-of-memory errors are not caught.
        """
        random_state = torch.cuda.get_rng_state(self._device)
        self._make_room()  # the passes below run on another stream, which has memory of its own
        graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        try:
            with self.flat.reading(self._leaves):
                self._warm_up(compute)
                torch.cuda.set_rng_state(random_state, self._device)
                wanted = self._run_launched(compute)
                self._make_room()
                before = torch.cuda.memory_reserved(self._device)
                with self._restored_after_failure():
                    captured = self._capture_graphs(compute, graphs)
                self._has_workspaces = True
                self._reserved += torch.cuda.memory_reserved(self._device) - before
            torch.cuda.set_rng_state(random_state, self._device)
            self._check(captured, *wanted, must_pay=must_pay)
        finally:
            torch.cuda.set_rng_state(random_state, self._device)
        return captured

    def check_room(self) -> None:
        """Raise NotCapturable if less memory is left for a launched pass than the graphs hold for theirs."""
        free, _ = torch.cuda.mem_get_info(self._device)
        free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device) - self._reserved
        if free < self._reserved:
            held, left = self._reserved / 2**20, free / 2**20
            raise NotCapturable(f"graphs hold {held:.0f} MiB, and only {left:.0f} MiB are left for launched passes")

    def _make_room(self) -> None:
        """Empty the cache, and free the workspaces until the pool has some, so that a capture allocates its own."""
        torch.cuda.synchronize(self._device)
        if not self._has_workspaces:
            release_workspaces()
        torch.cuda.empty_cache()

    def _warm_up(self, compute: Callable[[], Tensor]) -> None:
        """Run the pass once to compile, tune and allocate, and once to check that it does not wait for the device."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._forward_backward(compute)
            torch.cuda.synchronize(self._device)
            with _record_waits() as locations:
                self._forward_backward(compute)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        if locations:
            raise NotCapturable(f"the forward or backward pass waits for the device ({locations[0]})")

    def _run_launched(self, compute: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor], float]:
        """Return value and gradients of a launched pass, and its seconds."""
        with torch.cuda.stream(self._stream):
            torch.cuda.synchronize(self._device)
            started = time.perf_counter()
            value, gradients = self._forward_backward(compute)
            torch.cuda.synchronize(self._device)
        return value, gradients, time.perf_counter() - started

    def _forward_backward(self, compute: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
        value = compute()
        return value.detach(), list(torch.autograd.grad(value, self._leaves, torch.ones_like(value)))

    def _capture_graphs(
        self, compute: Callable[[], Tensor], graphs: "tuple[torch.cuda.CUDAGraph, ...]"
    ) -> CapturedPass:
        # Other threads, such as the checkpoint writer, may continue with calls that a capture forbids.
        where: dict[str, Any] = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(graphs[0], **where):
            value = compute()
        grad_output = torch.ones(value.shape, dtype=value.dtype, device=self._device)
        with torch.cuda.graph(graphs[1], **where):
            found = torch.autograd.grad(value, self._leaves, grad_output)
            for static, gradient in zip(self.gradients, found, strict=True):
                static.copy_(gradient)
            del found, gradient
        return CapturedPass(self, value.detach(), grad_output, graphs)

    def _check(
        self, captured: CapturedPass, value: Tensor, gradients: Sequence[Tensor], seconds: float, *, must_pay: bool
    ) -> None:
        """Replay the pass, and compare its numbers and its time with those of the launched pass."""
        grad_output = torch.ones_like(value)
        found, found_gradients = captured.replay_forward(), captured.replay_backward(grad_output)
        torch.cuda.synchronize(self._device)
        allowed = TOLERANCE.get(gradients[0].dtype, 2e-2)
        errors = [_difference(got, wanted) for got, wanted in zip(found_gradients, gradients, strict=True)]
        errors.append(_difference(found, value))
        for error in errors:
            if not error <= allowed:
                raise NotCapturable(f"the replay is off by {error:.2g} (allowed {allowed})")
        del found_gradients
        started = time.perf_counter()
        captured.replay_forward()
        captured.replay_backward(grad_output)
        torch.cuda.synchronize(self._device)
        captured.launched_s, captured.replayed_s = seconds, (took := time.perf_counter() - started)
        if must_pay and took > PAYS_BELOW * seconds:
            raise NotCapturable(f"it is not faster: {took * 1e3:.1f} ms replayed, {seconds * 1e3:.1f} ms launched")

    @contextmanager
    def _restored_after_failure(self) -> Iterator[None]:
        """Restore torch's generator and allocator if a capture in the block fails."""
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
    """Free the workspaces of cuBLAS; graphs that use them must have been deleted, or have them in their pool."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: CapturedPass, *buffers: Tensor) -> Tensor:
        ctx.captured = captured
        return captured.replay_forward()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.captured.replay_backward(grad_output)


@contextmanager
def _record_waits() -> Iterator[list[str]]:
    """Collect the places, as file and line, at which the host waits for the device within the block."""
    locations: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        # A warning instead of an error: other threads may wait.
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield locations
        finally:
            torch.cuda.set_sync_debug_mode(before)
    locations += [f"{each.filename}:{each.lineno}" for each in seen if _WAITS in str(each.message)]


def _difference(got: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference relative to that of `wanted`, computed in pieces."""
    pairs = list(zip(got.flatten().split(2**24), wanted.flatten().split(2**24), strict=True))
    squares = [((a.float() - b.float()).square().sum(), b.float().square().sum()) for a, b in pairs]
    error = float(torch.stack([difference for difference, _ in squares]).sum())
    size = float(torch.stack([square for _, square in squares]).sum())
    return (error / size) ** 0.5 if size else error**0.5
