"""The memory estimate's view of a model: its tensors and the widths of its layers."""

from dataclasses import dataclass
from typing import Literal

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
    """Whether it is stored and kept in MXFP4."""
    rows: int = 0
    """Rows of the matrix, or of all experts' matrices."""
    fp8_scales: int = 0
    """Number of scales if it is stored and kept in FP8, otherwise 0."""


@dataclass(frozen=True)
class NormBytes:
    """Norms over the residual stream: their number, and the bytes per token that their own code keeps, by dtype."""

    count: int
    in_16_bits: int
    in_32_bits: int


@dataclass(frozen=True)
class Mixer:
    """Attention, feed-forward or recurrent part of a layer; widths are elements per token."""

    kind: str
    """`attention`, `gated`, `plain` (feed-forward without a gate), `experts` or `recurrent`."""
    width_in: int
    """Input width of its first projections."""
    width_projected: int
    """Total output width of its first projections."""
    width_inner: int
    """Input width of its last projection."""
    heads: int
    trained_in: bool
    """Whether its first projections are adapted or trained, so that their input is kept for the backward pass."""
    trained_out: bool
    ranks: int
    """Sum of the padded ranks of its adapters."""
    norm_width: int = 0
    """Input width of norms within it (query and key norms)."""
    largest_weight: int = 0
    """Elements of its largest matrix."""
    copied: int = 0
    """Width of queries and keys that are copied out of a fused projection when they are rotated."""
    own_softmax: bool = False
    """Whether eager attention has probabilities in the dtype of its scores (attention sinks) rather than 32 bits."""
    relaid: bool = False
    """Whether the model's own rotary embedding changes the layout, so that attention's output is copied."""
    scan: int = 0
    """Elements per token of a recurrent layer's scan in plain torch."""
    activated: float = 2.0
    """What the activation's own code keeps, including its result, in units of its input (observed by running it)."""
    choices: int = 1
    """Number of experts that a token visits; widths are those of one expert."""
    packed: bool = False
    """Whether experts are stored in 4 or 8 bits, whatever the format of the rest of the base."""
    by_operator: bool = False
    """Whether our operator computes the experts; it keeps the frozen product of gate and up, and h, per visit."""
    known_gate: bool = False
    """Whether our operator supports the gate; on a GPU it then also computes experts without an adapter."""


@dataclass(frozen=True)
class Layer:
    """A decoder layer: the hidden width, its norms over that width, its mixers."""

    hidden: int
    norms: NormBytes
    mixers: tuple[Mixer, ...]

    @property
    def parallel(self) -> bool:
        """Whether attention and feed-forward layer read the output of the same norm."""
        return self.norms.count == 1 and sum(mixer.trained_in for mixer in self.mixers) > 1


@dataclass(frozen=True)
class Shapes:
    """Everything that the estimate uses of a model."""

    hidden: int
    vocabulary: int
    tied: bool
    norm: NormBytes
    """Norms outside of layers."""
    weights: tuple[Weight, ...]
    layers: tuple[Layer, ...]
    facts: ModelProperties
    """Model properties that determine the kernels."""
    softcap: bool
    """Whether attention scores are capped by tanh."""
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
