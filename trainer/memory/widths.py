"""The memory estimate's picture of a model: its tensors and the widths of its layers."""

from dataclasses import dataclass
from typing import Literal

from trainer.patches.model_properties import ModelProperties


@dataclass(frozen=True)
class Weight:
    """One parameter: its elements, whether it is a matrix that a quantised base packs, whether it is trained."""

    elements: int
    packable: bool
    trained: bool
    layer: int
    """Number of the decoder layer that it belongs to, -1 outside of them."""
    factor: bool = False
    """One of LoRA's two."""
    experts: int = 0
    """How many experts' matrices it holds, each of which is packed by itself; 0 for others."""
    mxfp4: bool = False
    """Whether it is stored in MXFP4 and stays so."""
    rows: int = 0
    """Of a matrix, or of all experts' matrices."""
    fp8_scales: int = 0
    """Scales that it is stored with in FP8, in which it stays; 0 of what is stored otherwise."""


@dataclass(frozen=True)
class NormBytes:
    """Norms over the residual stream: how many, and the bytes a token that their own code keeps, by its type."""

    count: int
    in_16_bits: int
    in_32_bits: int


@dataclass(frozen=True)
class Mixer:
    """Attention, feed-forward or recurrent part of a layer; widths are elements per token."""

    kind: str
    """`attention`, `gated`, `plain` (feed-forward without a gate), `experts` or `recurrent`."""
    width_in: int
    """What its first projections read."""
    width_projected: int
    """What they write, together."""
    width_inner: int
    """What its last projection reads."""
    heads: int
    trained_in: bool
    """Whether its first projections are adapted or trained, so that what they read is kept for the backward pass."""
    trained_out: bool
    ranks: int
    """Padded ranks of its adapters together."""
    norm_width: int = 0
    """What norms within it read (query and key norms)."""
    largest_weight: int = 0
    """Elements of its largest matrix."""
    copied: int = 0
    """Width of queries and keys that are rotated, and so copied, out of one fused projection."""
    own_softmax: bool = False
    """Whether eager attention takes its probabilities in the type of its scores (attention sinks), not in 32 bits."""
    relaid: bool = False
    """Whether the model's own rotary embedding leaves a layout for which attention's output is copied."""
    scan: int = 0
    """Elements per token of a recurrent layer's scan in plain torch."""
    activated: float = 2.0
    """What the activation's own code keeps, its result among it, in units of its input (seen by running it)."""
    choices: int = 1
    """Experts that a token visits; widths of experts are those of one."""
    packed: bool = False
    """Whether experts are stored in 4 or 8 bits, whatever the rest of the base is in."""
    by_operator: bool = False
    """Whether our operator computes the experts, and keeps the frozen product of gate and up and h of each visit."""
    known_gate: bool = False
    """Whether it can: on a GPU it then computes experts without an adapter as well."""


@dataclass(frozen=True)
class Layer:
    """One decoder layer: the hidden width, its norms over that width, its mixers."""

    hidden: int
    norms: NormBytes
    mixers: tuple[Mixer, ...]

    @property
    def parallel(self) -> bool:
        """Whether attention and feed-forward part read the output of one norm."""
        return self.norms.count == 1 and sum(mixer.trained_in for mixer in self.mixers) > 1


@dataclass(frozen=True)
class Shapes:
    """Everything the estimate reads of a model."""

    hidden: int
    vocabulary: int
    tied: bool
    norm: NormBytes
    """Those outside of the layers."""
    weights: tuple[Weight, ...]
    layers: tuple[Layer, ...]
    facts: ModelProperties
    """What decides between kernels."""
    softcap: bool
    """Whether its attention scores go through a hyperbolic tangent."""
    fp8: Literal["", "rows", "blocks"] = ""
    """What shares a scale in a checkpoint that is stored in FP8."""
    buffers: int = 0
    """Bytes of tables beside the weights, which stay as they are: SD3.5 Medium's positions take 864 MiB."""

    @property
    def trained(self) -> int:
        """Trained elements."""
        return sum(weight.elements for weight in self.weights if weight.trained)

    @property
    def frozen(self) -> int:
        """Frozen elements."""
        return sum(weight.elements for weight in self.weights if not weight.trained)
