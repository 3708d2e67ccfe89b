"""Replay micro-steps from CUDA graphs if the host cannot launch kernels as fast as they run.

A batch is padded to one of a few shapes (trainer/data/static_shapes.py). The first shape is captured at once,
others when they recur (trainer/parallel/engine/cuda_graphs.py). Batches that match no graph run eagerly.
"""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from statistics import median
from typing import Any, Literal

import torch
from rich.markup import escape
from torch import Tensor, nn

from trainer.contract.known_versions import patch_objects, replaces
from trainer.data.batches import MicroBatch
from trainer.data.static_shapes import StaticShape, choose_shape, measure_sizes, pad_to_shape
from trainer.parallel.engine.cuda_graphs import CapturedPass, CaptureError, GraphCapturer, release_workspaces
from trainer.parallel.engine.flat_adapter import FlatAdapter, find_flat_adapter, list_trained_parameters
from trainer.patches.loss_head import TokenLoss

WARMUP_BATCHES = 3
"""Initial micro-batches excluded from timing, since they include compilation, autotuning and allocation."""
MEASURED_BATCHES = 3
MIN_HOST_FRACTION = 0.8
"""Capture graphs only if launching a forward pass takes at least this fraction of its time."""
MAX_CAPTURES = 16
Log = Callable[[str], None]
Capture = tuple[StaticShape, "StaticInputs", CapturedPass]


class StaticInputs:
    """Inputs of one shape, as views of a buffer at a fixed address, so that a single copy transfers a batch."""

    def __init__(self, inputs: dict[str, Any], targets: Tensor, device: torch.device) -> None:
        self._tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        self._numbers = {name: value for name, value in inputs.items() if not isinstance(value, Tensor)}
        self._shapes = {name: value.shape for name, value in self._tensors.items()} | {"": targets.shape}
        self._types = {name: value.dtype for name, value in self._tensors.items()}
        sizes = [shape.numel() for shape in self._shapes.values()]
        self._buffer = torch.zeros(sum(sizes), dtype=torch.long, device=device)
        pieces = zip(self._shapes.items(), self._buffer.split(sizes), strict=True)
        self._views = {name: piece.view(shape) for (name, shape), piece in pieces}
        self.fill(inputs, targets)

    def fill(self, inputs: dict[str, Any], targets: Tensor) -> None:
        parts = [*(inputs[name] for name in self._tensors), targets]
        packed = torch.cat([part.reshape(-1).long() for part in parts])
        if self._buffer.device.type == "cuda":
            packed = packed.pin_memory()
        self._buffer.copy_(packed, non_blocking=True)

    def read(self) -> tuple[dict[str, Any], Tensor]:
        tensors = {name: self._views[name].to(dtype) for name, dtype in self._types.items()}
        return tensors | self._numbers, self._views[""]


class GraphedLoss:
    """A `TokenLoss` for training that replays CUDA graphs.

    In mode `auto`, graphs are used only if the first steps are host-bound and a replay is faster.
    """

    def __init__(self, loss: TokenLoss, module: nn.Module, flat: FlatAdapter, mode: Literal["auto", "on"], log: Log):
        self._loss, self._module, self._flat, self._mode, self._log = loss, module, flat, mode, log
        self._capturer: GraphCapturer | None = None
        self._captures: dict[StaticShape, Capture] = {}
        self._seen: Counter[StaticShape] = Counter()
        self._sizes: list[tuple[int, int]] = []
        self._host_fractions: list[float] = []
        self._calls = self._replayed = 0
        self.off_reason = ""
        """Why graphs are no longer used; empty while they are used."""

    @classmethod
    def create(
        cls, loss: TokenLoss, module: nn.Module, mode: Literal["auto", "on"], log: Log, *, has_experts: bool
    ) -> "GraphedLoss | None":
        """Return a GraphedLoss; if passes cannot be replayed, report why and return None."""
        flat = find_flat_adapter(module)
        if flat is None:
            return None
        others = len(list_trained_parameters(module)) - len(flat.members)
        if others:
            reason = f"{others} trained tensors are not in the adapter's buffer"
        elif loss.separates_documents:
            reason = "recurrent layers compute the documents of a batch separately"
        elif has_experts:
            reason = "every batch uses different experts"
        else:
            return cls(loss, module, flat, mode, log)
        log(f"CUDA graphs are off: {reason}")
        return None

    @property
    def load_balancing_loss(self) -> Tensor | float:
        return self._loss.load_balancing_loss

    def __call__(self, model: Any, batch: MicroBatch, device: torch.device) -> Tensor:
        self._calls += 1
        if self.off_reason or not self._module.training or not torch.is_grad_enabled() or self._flat.view_hook:
            return self._loss(model, batch, device)
        if len(self._sizes) < WARMUP_BATCHES + MEASURED_BATCHES:
            return self._run_and_measure(model, batch, device)
        capture = self._find_capture(batch, device)
        if capture is None:
            return self._loss(model, batch, device)
        shape, inputs, captured = capture
        inputs.fill(*self._build_host_inputs(batch, shape))
        self._replayed += 1
        # Call the engine's forward, because its hooks on the model's outputs prepare the backward pass.
        with self._flat.build_stacks_only(), replace_forward(self._module, lambda: captured()):
            result: Tensor = model()
        return result

    def pop_metrics(self, *, training: bool = True) -> dict[str, float]:
        return self._loss.pop_metrics(training=training)

    def pop_replayed_fraction(self) -> float:
        fraction = self._replayed / max(self._calls, 1)
        self._calls = self._replayed = 0
        return fraction

    def release_graphs(self, reason: str = "") -> None:
        """Free all graphs and their memory. If a reason is given, use no graphs from now on."""
        if reason and not self.off_reason:
            self.off_reason = reason
            self._log(f"CUDA graphs are off: {escape(reason)}")
        if self._capturer is not None:
            self._captures.clear()
            self._capturer = None
            release_workspaces()
            torch.cuda.empty_cache()

    def _build_host_inputs(self, batch: MicroBatch, shape: StaticShape) -> tuple[dict[str, Any], Tensor]:
        return self._loss.build_host_inputs(pad_to_shape(batch, shape), shape.targets)

    def _run_and_measure(self, model: Any, batch: MicroBatch, device: torch.device) -> Tensor:
        """Run the pass eagerly. After the warm-up, also measure the fraction of time spent on launching kernels."""
        self._sizes.append(measure_sizes(batch))
        if self._mode == "on" or len(self._sizes) <= WARMUP_BATCHES:
            return self._loss(model, batch, device)
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        loss = self._loss(model, batch, device)
        launched = time.perf_counter()
        torch.cuda.synchronize(device)
        self._host_fractions.append((launched - started) / (time.perf_counter() - started))
        if (
            len(self._host_fractions) == MEASURED_BATCHES
            and (fraction := median(self._host_fractions)) < MIN_HOST_FRACTION
        ):
            self.release_graphs(f"launching takes only {fraction:.0%} of a forward pass's time")
        return loss

    def _find_capture(self, batch: MicroBatch, device: torch.device) -> Capture | None:
        """Return the graph for this batch, or None if the batch must run eagerly. Captures a shape that recurs."""
        if self._capturer is not None and not self._capturer.is_current:
            self._give_up("the adapter's address in memory has changed", warn=True)
            return None
        if batch.weights is not None or batch.images:
            return None
        shape = choose_shape(batch, self._sizes[0] if len(set(self._sizes)) == 1 else (0, 0))
        fitting = [other for other in self._captures if other.can_hold(shape)]
        if fitting:
            return self._captures[shape if shape in fitting else min(fitting, key=lambda other: other.targets)]
        self._seen[shape] += 1
        should_capture = self._seen[shape] > 1 or not self._captures
        if not should_capture or not self._loss.is_head_probed or len(self._captures) == MAX_CAPTURES:
            return None
        return self._capture(batch, shape, device)

    def _capture(self, batch: MicroBatch, shape: StaticShape, device: torch.device) -> Capture | None:
        started, reason = time.perf_counter(), ""
        try:
            if self._capturer is None:
                self._capturer = GraphCapturer(self._flat)
            inputs = StaticInputs(*self._build_host_inputs(batch, shape), device)
            captured = self._capturer.capture(
                lambda: self._loss.compute_from_inputs(self._module, *inputs.read()),
                must_be_faster=self._mode == "auto",
            )
            self._capturer.check_free_memory()
        except CaptureError as error:
            reason = str(error)
        except torch.OutOfMemoryError as error:
            reason = _describe_first_error(error)
        except Exception as error:  # from torch, CUDA, Triton, or the model's own code
            self._give_up(_describe_first_error(error), warn=True)
            return None
        if reason:  # after the except blocks, since their error keeps the captured tensors alive
            self._give_up(reason, warn=self._mode == "on")
            return None
        if not self._captures:
            times = f"{captured.replayed_s * 1e3:.1f} ms instead of {captured.launched_s * 1e3:.1f} ms"
            self._log(
                f"CUDA graphs: micro-steps are replayed in {times}; captured in {time.perf_counter() - started:.1f} s"
            )
        self._captures[shape] = shape, inputs, captured
        return self._captures[shape]

    def _give_up(self, reason: str, *, warn: bool) -> None:
        if warn:
            self._log("[yellow]warning:[/yellow] micro-steps could not be captured")
        self.release_graphs(reason)


def _describe_first_error(error: BaseException) -> str:
    """Return the type and first line of the first error in the chain, as ending a failed capture raises another."""
    while error.__context__ is not None:
        error = error.__context__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


@replaces("the model's forward in a replayed micro-step")
def replace_forward(module: Any, forward: Callable[..., Any]) -> AbstractContextManager[None]:
    """Replace the module's forward within the context; its hooks still run."""
    return patch_objects((module, "forward", forward))
