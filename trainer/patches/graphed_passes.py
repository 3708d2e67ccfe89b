"""Passes that CUDA graphs can replay: the loss of a micro-batch, and the divergence on reference text."""

from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.batches import MicroBatch
from trainer.data.static_shapes import StaticShape, pad_to_shape, shape_of
from trainer.patches.loss_head import TokenLoss


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
        return shape_of(self.batch) if self._loss.states_dtype and self.batch.cu_seqlens is not None else None

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
