"""The loss of a micro-batch, replayed from CUDA graphs if the host cannot launch kernels as fast as they run.

A batch is padded to one of a few shapes (trainer/data/static_shapes.py); the passes of a shape are captured when it
occurs for the second time (trainer/parallel/engine/cuda_graphs.py). Batches that fit no graph are launched eagerly.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from rich.markup import escape
from torch import Tensor, nn

from trainer.contract.replacements import replaces
from trainer.data.batches import MicroBatch
from trainer.data.static_shapes import StaticShape, pad_to_shape, shape_of, sizes_of
from trainer.parallel.engine.cuda_graphs import CapturedPass, GraphCapturer, NoRoom, NotCapturable, release_workspaces
from trainer.parallel.engine.flat_adapter import FlatAdapter, find_flat_adapter, trained_parameters
from trainer.patches.loss_head import TokenLoss

UNMEASURED = 3
"""Number of first micro-batches, which compile, tune and allocate."""
MEASURED = 3
HOST_BOUND = 0.8
"""Capture is tried if launching takes the host at least this fraction of a forward pass."""
MOST_CAPTURES = 16
REFERENCE_PARTS = 4
"""Padding adds at most 1 / REFERENCE_PARTS to a batch of reference text: single texts have many lengths."""
Say = Callable[[str], None]
Shape = tuple[type["LossPass"], StaticShape]
Replayed = tuple[Shape, tuple["StaticInputs", CapturedPass]]


class StaticInputs:
    """The inputs of one shape at fixed addresses: one buffer, so that one copy transfers a batch."""

    def __init__(self, inputs: dict[str, Any], targets: Tensor, device: torch.device) -> None:
        self._tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        self._numbers = {name: value for name, value in inputs.items() if not isinstance(value, Tensor)}
        self._shapes = {name: value.shape for name, value in self._tensors.items()} | {"": targets.shape}
        self._types = {name: value.dtype for name, value in self._tensors.items()}
        sizes = [shape.numel() for shape in self._shapes.values()]
        self._buffer = torch.zeros(sum(sizes), dtype=torch.long, device=device)
        pieces = zip(self._shapes.items(), self._buffer.split(sizes), strict=True)
        self._views = {name: piece.view(shape) for (name, shape), piece in pieces}
        self.base_states: Tensor | None = None
        """Hidden states of the base model for reference text, if any."""
        self.fill(inputs, targets)

    def fill(self, inputs: dict[str, Any], targets: Tensor) -> None:
        """Copy a batch of the same shape from the host."""
        parts = [*(inputs[name] for name in self._tensors), targets]
        together = torch.cat([part.reshape(-1).long() for part in parts])
        if self._buffer.device.type == "cuda":
            together = together.pin_memory()
        self._buffer.copy_(together, non_blocking=True)

    def read(self) -> tuple[dict[str, Any], Tensor]:
        """Return the arguments of `TokenLoss.compute_from_inputs`."""
        tensors = {name: self._views[name].to(dtype) for name, dtype in self._types.items()}
        return tensors | self._numbers, self._views[""]


class LossPass:
    """The loss sum of a micro-batch, to launch or to replay."""

    def __init__(self, loss: TokenLoss, batch: MicroBatch) -> None:
        self._loss, self.batch = loss, batch

    def launch(self, model: Any, device: torch.device) -> Tensor:
        """Return the loss, without a graph."""
        return self._loss(model, self.batch, device)

    def shape(self, usual: tuple[int, int]) -> StaticShape | None:
        """Return the shape to pad the batch to (see `shape_of`); None to launch the pass."""
        return shape_of(self.batch, usual) if self.batch.weights is None else None

    def static(self, shape: StaticShape, device: torch.device) -> StaticInputs:
        """Return static memory for inputs of a shape that fits the batch, filled with the batch."""
        return StaticInputs(*self._on_host(shape), device)

    def fill(self, inputs: StaticInputs, shape: StaticShape) -> None:
        """Copy the batch into static memory."""
        inputs.fill(*self._on_host(shape))

    def compute(self, module: nn.Module, inputs: StaticInputs) -> Tensor:
        """Return the loss of the inputs in static memory."""
        return self._loss.compute_from_inputs(module, *inputs.read())

    def _on_host(self, shape: StaticShape) -> tuple[dict[str, Any], Tensor]:
        return self._loss.build_host_inputs(pad_to_shape(self.batch, shape), shape.places)


class DivergencePass(LossPass):
    """The divergence on a batch of reference text."""

    def __init__(self, loss: TokenLoss, batch: MicroBatch, base_states: Tensor) -> None:
        super().__init__(loss, batch)
        self._base_states = base_states

    def launch(self, model: Any, device: torch.device) -> Tensor:
        return self._loss.divergence(model, self.batch, device, base_states=self._base_states, with_gradient=True)

    def shape(self, usual: tuple[int, int]) -> StaticShape | None:
        # Only in a flat pack are the targets of the padding behind all others.
        if not self._loss.states_dtype or self.batch.cu_seqlens is None:
            return None
        return shape_of(self.batch, parts=REFERENCE_PARTS)

    def static(self, shape: StaticShape, device: torch.device) -> StaticInputs:
        inputs = super().static(shape, device)
        size = shape.places, self._base_states.shape[1]
        inputs.base_states = torch.zeros(size, dtype=self._loss.states_dtype, device=device)
        self._fill_states(inputs.base_states)
        return inputs

    def fill(self, inputs: StaticInputs, shape: StaticShape) -> None:
        super().fill(inputs, shape)
        assert inputs.base_states is not None
        self._fill_states(inputs.base_states)

    def compute(self, module: nn.Module, inputs: StaticInputs) -> Tensor:
        assert inputs.base_states is not None
        return self._loss.compute_divergence_from_inputs(module, *inputs.read(), inputs.base_states)

    def _fill_states(self, static: Tensor) -> None:
        static[: len(self._base_states)].copy_(self._base_states)
        static[len(self._base_states) :].zero_()


class GraphedLoss:
    """A `TokenLoss` for training that replays CUDA graphs.

    With `mode` auto only if the first steps are bound by the host and a replay is faster.
    """

    def __init__(self, loss: TokenLoss, module: nn.Module, flat: FlatAdapter, mode: Literal["auto", "on"], say: Say):
        self._loss, self._module, self._flat, self._mode, self._say = loss, module, flat, mode, say
        # Both passes of a step are replayed before their backward passes, so each has memory of its own.
        self._capturers: dict[type[LossPass], GraphCapturer] = {}
        self._captures: dict[Shape, tuple[StaticInputs, CapturedPass]] = {}
        self._penalties: list[GraphedPenalty] = []
        self._seen: Counter[Shape] = Counter()
        self._sizes: list[tuple[int, int]] = []
        self._host_fractions: list[float] = []
        self._calls = self._replayed = 0
        self._launches_reference = False
        self.why_not = ""
        """Why nothing is replayed any more; empty while graphs are in use."""

    @classmethod
    def of(
        cls, loss: TokenLoss, module: nn.Module, mode: Literal["auto", "on"], say: Say, *, has_experts: bool
    ) -> "GraphedLoss | None":
        """Return None if passes cannot be replayed: no flat adapter, experts, or other trained weights."""
        flat = find_flat_adapter(module)
        if flat is None:
            return None
        others = len(trained_parameters(module)) - len(flat.members)
        if others:
            say(f"CUDA graphs: off: {others} trained tensors are not in the adapter's buffer")
            return None
        if loss.separates_documents:
            say("CUDA graphs: off: recurrent layers compute every batch's documents apart")
            return None
        if has_experts:
            say("CUDA graphs: off: every batch uses different experts")
            return None
        return cls(loss, module, flat, mode, say)

    @property
    def balancing(self) -> Tensor | float:
        return self._loss.balancing

    def __call__(self, model: Any, batch: MicroBatch, device: torch.device) -> Tensor:
        """Return the sum of the losses of the batch's targets, nats, fp32."""
        return self._run(LossPass(self._loss, batch), model, device)

    def divergence(
        self, model: Any, batch: MicroBatch, device: torch.device, *, base_states: Tensor, with_gradient: bool
    ) -> Tensor:
        """See `TokenLoss.divergence`; replayed once micro-batches are."""
        if self._launches_reference or not self._captures or not with_gradient:
            return self._loss.divergence(model, batch, device, base_states=base_states, with_gradient=with_gradient)
        with self._flat.keep_views():
            return self._run(DivergencePass(self._loss, batch, base_states), model, device)

    def _run(self, wanted: LossPass, model: Any, device: torch.device) -> Tensor:
        self._calls += 1
        if self.why_not or not self._may_replay():
            return wanted.launch(model, device)
        if len(self._sizes) < UNMEASURED + MEASURED:
            return self._measure(wanted, model, device)
        found = self._find_capture(wanted, device)
        if found is None:
            return wanted.launch(model, device)
        shape, (inputs, captured) = found
        wanted.fill(inputs, shape[1])
        self._replayed += 1
        # Through the engine: its hooks on a model's outputs prepare the backward pass.
        with self._flat.build_stacks_only(), replace_forward(self._module, lambda: captured()):
            result: Tensor = model()
        return result

    def values(self, *, training: bool = True) -> dict[str, float]:
        """See `TokenLoss.values`."""
        return self._loss.values(training=training)

    def take_fraction(self) -> float:
        """Return the fraction of batches since the last call that were replayed."""
        share = self._replayed / max(self._calls, 1)
        self._calls = self._replayed = 0
        return share

    def drop(self, why_not: str = "") -> None:
        """Free all graphs and their memory; with a reason, replay nothing from now on."""
        if why_not and not self.why_not:
            self.why_not = why_not
            self._say(f"CUDA graphs: off: {escape(why_not)}")
        if self._capturers:
            self._captures.clear()
            self._capturers.clear()
            for penalty in self._penalties:
                penalty.drop()
            release_workspaces()
            torch.cuda.empty_cache()

    def penalty(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return `compute`, a penalty on the flat adapter, replayed while the loss is."""
        self._penalties.append(GraphedPenalty(compute, self._flat))
        return self._penalties[-1]

    def _may_replay(self) -> bool:
        return self._module.training and torch.is_grad_enabled() and not self._flat.is_watched

    def _measure(self, wanted: LossPass, model: Any, device: torch.device) -> Tensor:
        """Launch the pass; after the first batches also measure the fraction of its time spent launching."""
        self._sizes.append(sizes_of(wanted.batch))
        if self._mode == "on" or len(self._sizes) <= UNMEASURED:
            return wanted.launch(model, device)
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        found = wanted.launch(model, device)
        launched = time.perf_counter()
        torch.cuda.synchronize(device)
        self._host_fractions.append((launched - started) / (time.perf_counter() - started))
        if (
            len(self._host_fractions) == MEASURED
            and (share := sorted(self._host_fractions)[MEASURED // 2]) < HOST_BOUND
        ):
            self.drop(f"the host needs only {share:.0%} of a forward pass to launch it")
        return found

    def _find_capture(self, wanted: LossPass, device: torch.device) -> Replayed | None:
        """Return the graph that replays this pass, captured now if its shape recurs; None to launch the pass."""
        if not all(capturer.is_current for capturer in self._capturers.values()):
            self._give_up("the adapter's address in memory has changed", warn=True)
            return None
        usual = self._sizes[0] if len(set(self._sizes)) == 1 else (0, 0)
        static = wanted.shape(usual)
        if static is None:
            return None
        shape = type(wanted), static
        fitting = [other for other in self._captures if other[0] is type(wanted) and other[1].holds(static)]
        if fitting:
            best = shape if shape in fitting else min(fitting, key=lambda other: other[1].places)
            return best, self._captures[best]
        self._seen[shape] += 1
        recurs = self._seen[shape] > 1 or not self._captures
        if not recurs or not self._loss.observed or len(self._captures) == MOST_CAPTURES:
            return None
        return self._capture(wanted, shape, device)

    def _capture(self, wanted: LossPass, shape: Shape, device: torch.device) -> Replayed | None:
        kind, static = shape
        started, refusal, no_room = time.perf_counter(), "", False
        try:
            if kind not in self._capturers:
                self._capturers[kind] = GraphCapturer(self._flat, shares_workspaces=bool(self._capturers))
            capturer, inputs = self._capturers[kind], wanted.static(static, device)
            captured = capturer.capture(lambda: wanted.compute(self._module, inputs), must_pay=self._mode == "auto")
            capturer.check_room()
            if not self._captures:
                for penalty in self._penalties:
                    penalty.capture()
        except NotCapturable as reason:
            refusal, no_room = str(reason), isinstance(reason, NoRoom)
        except torch.OutOfMemoryError as error:
            refusal, no_room = _first_line(error), True
        except Exception as error:  # of torch, CUDA, Triton, or of the model's own code
            self._give_up(_first_line(error), warn=True)
            return None
        if refusal:  # after the except blocks: their error keeps the captured tensors alive
            self._refuse(kind, refusal, no_room=no_room)
            return None
        if not self._captures:
            took = f"{captured.replayed_s * 1e3:.1f} ms instead of {captured.launched_s * 1e3:.1f}"
            self._say(
                f"CUDA graphs: micro-steps are replayed: {took}; captured in {time.perf_counter() - started:.1f} s"
            )
        self._captures[shape] = inputs, captured
        return shape, self._captures[shape]

    def _refuse(self, kind: type[LossPass], reason: str, *, no_room: bool) -> None:
        """Launch reference text, or everything, from now on, since it cannot be captured."""
        if kind is LossPass:
            self._give_up(reason, warn=self._mode == "on")
            return
        if self._mode == "on":
            self._say("[yellow]warning:[/yellow] the pass over reference text could not be captured")
        self._launches_reference = True
        self._say(f"CUDA graphs: off for reference text: {escape(reason)}")
        if no_room:
            self.drop()  # micro-batches are captured again

    def _give_up(self, reason: str, *, warn: bool) -> None:
        if warn:
            self._say("[yellow]warning:[/yellow] micro-steps could not be captured")
        self.drop(reason)


class GraphedPenalty:
    """A penalty on the adapter with its gradient, as two launches instead of a few hundred small ones."""

    def __init__(self, compute: Callable[[], Tensor], flat: FlatAdapter) -> None:
        self._compute, self._flat = compute, flat
        self._captured: CapturedPass | None = None

    def __call__(self) -> Tensor:
        """Return the penalty, replayed if it was captured."""
        return self._compute() if self._captured is None else self._captured()

    def capture(self) -> None:
        """Capture the penalty between two steps, in its own memory because the loss is replayed alongside."""
        self._captured = GraphCapturer(self._flat, shares_workspaces=True).capture(
            self._compute_from_new_stacks, must_pay=False
        )

    def drop(self) -> None:
        """Launch the penalty from now on."""
        self._captured = None

    def _compute_from_new_stacks(self) -> Tensor:
        with self._flat.build_stacks_only():
            self._flat.read_through_views()
        return self._compute()


def _first_line(error: BaseException) -> str:
    """Return type and first line of the original error: ending a failed capture raises another one."""
    while error.__context__ is not None:
        error = error.__context__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


@replaces("the model's forward in a replayed micro-step")
@contextmanager
def replace_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the module's forward within the block; its hooks still run."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
