"""Capture the forward and the backward pass of a loss over the flat adapter as two CUDA graphs.

A small step is host-bound: it launches a few thousand kernels that each take microseconds on the device. A graph is one
launch. It reads and writes the same memory every time, so inputs are copied into static tensors before a replay, and
results are copied out afterwards. A captured pass must not synchronize with the device.

To autograd, a captured pass is one function of the flat buffers, so hooks on them, accumulation, loss scales and
reductions work as usual. The gradient of the loss is an input to the second graph, so a replay runs the same kernels
and computes the same bits as an eager pass. A replay advances torch's random generator as an eager pass does.

All graphs share one memory pool. The forward and the backward graph of a pass are always replayed one after
the other, after which their memory is free. cuBLAS's workspaces (32 MiB per thread and stream on Hopper)
are also in the pool. The workspaces of the eager stream are freed, and the next eager pass allocates them
again. Graphs contain no collectives, so ranks may capture different passes.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from trainer.parallel.engine.flat_adapter import FlatAdapter

MAX_TIME_FRACTION = 0.95
"""A graph is kept if a replay takes at most this fraction of an eager pass's time."""
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Largest allowed relative difference of a graph's gradients; 2e-2 for 16-bit types."""
_STREAMS: dict[torch.device, torch.cuda.Stream] = {}
"""Capture stream of each device."""
_SYNC_WARNING = "called a synchronizing CUDA operation"


class CaptureError(RuntimeError):
    """Raised if a pass cannot be captured; no state has changed."""


class CapturedPass:
    """A captured pass; calling it replays the forward graph, and autograd replays the backward graph."""

    def __init__(
        self, capturer: "GraphCapturer", value: Tensor, grad_output: Tensor, graphs: "tuple[torch.cuda.CUDAGraph, ...]"
    ) -> None:
        self._capturer, self._value, self._grad_output = capturer, value, grad_output
        self._forward, self._backward = graphs
        self.launched_s = self.replayed_s = 0.0
        """Seconds for one forward and backward pass, eager and replayed."""

    def __call__(self) -> Tensor:
        return _Replay.apply(self, *self._capturer.flat.buffers)

    def replay_forward(self) -> Tensor:
        """Replay the forward graph and return the loss; call `replay_backward` before replaying another pass."""
        self._capturer.replaying = self
        self._forward.replay()
        return self._value.clone()

    def replay_backward(self, grad_output: Tensor) -> list[Tensor]:
        """Replay the backward graph and return the gradient of the latest loss with respect to each flat buffer."""
        if self._capturer.replaying is not self:
            raise RuntimeError("another graph was replayed between the forward and the backward pass of this one")
        self._capturer.replaying = None
        self._grad_output.copy_(grad_output)
        self._backward.replay()
        return [gradient.clone() for gradient in self._capturer.gradients]


class GraphCapturer:
    """Captures passes over one flat adapter in one memory pool."""

    def __init__(self, flat: FlatAdapter) -> None:
        self.flat = flat
        self._has_workspaces = False
        # Captured passes read these instead of the buffers, which have the engine's hooks.
        self._leaves = [buffer.detach().requires_grad_() for buffer in flat.buffers]
        self._device = device = self._leaves[0].device
        self.gradients = [torch.zeros_like(leaf, requires_grad=False) for leaf in self._leaves]
        self.replaying: CapturedPass | None = None
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _STREAMS.setdefault(device, torch.cuda.Stream(device))
        self._reserved = 0

    @property
    def is_current(self) -> bool:
        """Whether the buffers still have the same addresses as during capture."""
        pairs = zip(self._leaves, self.flat.buffers, strict=True)
        return all(leaf.data_ptr() == buffer.data_ptr() for leaf, buffer in pairs)

    def capture(self, compute: Callable[[], Tensor], *, must_be_faster: bool) -> CapturedPass:
        """Capture `compute` and its backward pass, after a few warm-up runs.

        `compute` must depend only on the flat adapter and static inputs, and return fp32. Raises CaptureError if it
        synchronizes with the device, or if a replay computes different results or, with `must_be_faster`, is not
        faster. CUDA and out-of-memory errors are not caught.
        """
        random_state = torch.cuda.get_rng_state(self._device)
        self._free_cache()  # the passes below run on another stream, with its own memory
        graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        try:
            with self.flat.read_from(self._leaves):
                self._warm_up(compute)
                torch.cuda.set_rng_state(random_state, self._device)
                expected = self._run_eagerly(compute)
                self._free_cache()
                before = torch.cuda.memory_reserved(self._device)
                with self._restore_after_failure():
                    captured = self._capture_graphs(compute, graphs)
                self._has_workspaces = True
                self._reserved += torch.cuda.memory_reserved(self._device) - before
            torch.cuda.set_rng_state(random_state, self._device)
            self._check_replay(captured, *expected, must_be_faster=must_be_faster)
        finally:
            torch.cuda.set_rng_state(random_state, self._device)
        return captured

    def check_free_memory(self) -> None:
        """Raise CaptureError if less memory is free for eager passes than the graphs reserve."""
        free, _ = torch.cuda.mem_get_info(self._device)
        free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device) - self._reserved
        if free < self._reserved:
            held, left = self._reserved / 2**20, free / 2**20
            raise CaptureError(f"graphs hold {held:.0f} MiB, and only {left:.0f} MiB are free for eager passes")

    def _free_cache(self) -> None:
        """Empty the allocator's cache and, before the first capture, free the workspaces outside the graphs' pool."""
        torch.cuda.synchronize(self._device)
        if not self._has_workspaces:
            release_workspaces()
        torch.cuda.empty_cache()

    def _warm_up(self, compute: Callable[[], Tensor]) -> None:
        """Run the pass to compile, tune and allocate; check that a second run does not synchronize with the device."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._run_forward_backward(compute)
            torch.cuda.synchronize(self._device)
            with _record_synchronizations() as locations:
                self._run_forward_backward(compute)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        if locations:
            raise CaptureError(f"the forward or backward pass synchronizes with the device ({locations[0]})")

    def _run_eagerly(self, compute: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor], float]:
        with torch.cuda.stream(self._stream):
            torch.cuda.synchronize(self._device)
            started = time.perf_counter()
            value, gradients = self._run_forward_backward(compute)
            torch.cuda.synchronize(self._device)
        return value, gradients, time.perf_counter() - started

    def _run_forward_backward(self, compute: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
        value = compute()
        return value.detach(), list(torch.autograd.grad(value, self._leaves, torch.ones_like(value)))

    def _capture_graphs(
        self, compute: Callable[[], Tensor], graphs: "tuple[torch.cuda.CUDAGraph, ...]"
    ) -> CapturedPass:
        # "thread_local", since other threads, such as the checkpoint writer, may make calls that a capture forbids.
        options: dict[str, Any] = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(graphs[0], **options):
            value = compute()
        grad_output = torch.ones(value.shape, dtype=value.dtype, device=self._device)
        with torch.cuda.graph(graphs[1], **options):
            gradients = torch.autograd.grad(value, self._leaves, grad_output)
            for static, gradient in zip(self.gradients, gradients, strict=True):
                static.copy_(gradient)
            del gradients, gradient
        return CapturedPass(self, value.detach(), grad_output, graphs)

    def _check_replay(
        self,
        captured: CapturedPass,
        value: Tensor,
        gradients: Sequence[Tensor],
        seconds: float,
        *,
        must_be_faster: bool,
    ) -> None:
        grad_output = torch.ones_like(value)
        replayed = [captured.replay_forward(), *captured.replay_backward(grad_output)]
        torch.cuda.synchronize(self._device)
        allowed = TOLERANCES.get(gradients[0].dtype, 2e-2)
        for actual, expected in zip(replayed, [value, *gradients], strict=True):
            if not (error := _compute_relative_error(actual, expected)) <= allowed:
                raise CaptureError(f"the replay differs from an eager pass by {error:.2g} (allowed {allowed})")
        del replayed, actual
        started = time.perf_counter()
        captured.replay_forward()
        captured.replay_backward(grad_output)
        torch.cuda.synchronize(self._device)
        captured.launched_s, captured.replayed_s = seconds, (replay_s := time.perf_counter() - started)
        if must_be_faster and replay_s > MAX_TIME_FRACTION * seconds:
            raise CaptureError(f"replay is not faster: {replay_s * 1e3:.1f} ms, eager {seconds * 1e3:.1f} ms")

    @contextmanager
    def _restore_after_failure(self) -> Iterator[None]:
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
    """Free cuBLAS's workspaces; the caller must first delete any graph that uses workspaces outside its pool."""
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
def _record_synchronizations() -> Iterator[list[str]]:
    """Collect the source lines (`file:line`) that synchronize with the device within the block."""
    locations: list[str] = []
    previous_mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # A warning instead of an error, because other threads may synchronize.
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield locations
        finally:
            torch.cuda.set_sync_debug_mode(previous_mode)
    locations += [f"{item.filename}:{item.lineno}" for item in caught if _SYNC_WARNING in str(item.message)]


def _compute_relative_error(actual: Tensor, expected: Tensor) -> float:
    pairs = list(zip(actual.flatten().split(2**24), expected.flatten().split(2**24), strict=True))
    error = sum(float((a.float() - b.float()).square().sum()) for a, b in pairs)
    size = sum(float(b.float().square().sum()) for _, b in pairs)
    return (error / size) ** 0.5 if size else error**0.5
