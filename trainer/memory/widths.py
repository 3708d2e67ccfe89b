"""The memory estimate's view of a model: its tensors and its layers."""

from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.patches.model_properties import ModelProperties


@dataclass(frozen=True)
class Weight:
    """A parameter: its elements, whether it is a matrix that a quantized base packs, whether it is trained."""

    elements: int
    packable: bool
    trained: bool
    layer: int
    """Index of its decoder layer; -1 outside of layers."""
    factor: bool = False
    """Whether it is a LoRA factor."""
    experts: int = 0
    """Number of experts in it, each of which is packed separately; 0 for other weights."""
    mxfp4: bool = False
    """Whether it stays in MXFP4, as stored."""
    rows: int = 0
    """Rows of the matrix, or of all experts' matrices."""
    fp8_scales: int = 0
    """Number of scales if it is stored and kept in FP8, otherwise 0."""


@dataclass(frozen=True)
class Shapes:
    """Everything that the estimate uses of a model."""

    hidden: int
    vocabulary: int
    tied: bool
    weights: tuple[Weight, ...]
    layers: tuple[int, ...]
    """The kind of each layer; layers of one kind keep the same."""
    properties: ModelProperties
    """Model properties that determine the kernels."""
    model: Any = field(repr=False, compare=False)
    """The empty model with its adapter, in which only the first layer of each kind has contents."""
    fp8: Literal["", "rows", "blocks"] = ""
    """What shares a scale in an FP8 checkpoint."""
    buffers: int = 0
    """Bytes of buffers, which keep their dtype: SD3.5 Medium's position table takes 864 MiB."""

    @property
    def trained(self) -> int:
        """Number of trained elements."""
        return sum(weight.elements for weight in self.weights if weight.trained)

    @property
    def frozen(self) -> int:
        """Number of frozen elements."""
        return sum(weight.elements for weight in self.weights if not weight.trained)
