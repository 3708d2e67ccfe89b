"""What the memory estimate has to know of a model: its tensors and the widths of its layers, read off empty modules.

Nothing is loaded: the modules are the real ones, with PEFT's adapter in place, on torch's meta device.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.config import LoraSection, ModelSection
from trainer.config.known_versions import require
from trainer.linear import is_linear

# The projections that read what their block has computed; all others of the block read what comes into it.
OUTPUTS = ("o_proj", "out_proj", "down_proj", "output_linear", "dense_4h_to_h", "c_proj", "fc2", "w2", "wo", "dense")
SMALL_RANK_STEP = 8  # the operators pad the rank of each adapter to a multiple of this


@dataclass(frozen=True)
class Weight:
    """One parameter: its elements, whether it is a matrix that a 4-bit base packs, whether it is trained."""

    elements: int
    packable: bool
    trained: bool
    layer: int
    """Number of the decoder layer that it belongs to, -1 outside of them."""
    factor: bool = False
    """One of LoRA's two."""


@dataclass(frozen=True)
class Mixer:
    """Attention, feed-forward or recurrent part of a layer; widths are elements per token."""

    kind: str
    """`attention`, `gated`, `plain` (feed-forward without a gate) or `recurrent`."""
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
    """Width of queries and keys that are copied out of one fused projection."""
    scan: int = 0
    """Elements per token of a recurrent layer's scan in plain torch."""


@dataclass(frozen=True)
class Layer:
    """One decoder layer: the hidden width, its norms over that width, its mixers."""

    hidden: int
    norms: int
    mixers: tuple[Mixer, ...]


@dataclass(frozen=True)
class Shapes:
    """Everything the estimate reads of a model."""

    hidden: int
    vocabulary: int
    tied: bool
    weights: tuple[Weight, ...]
    layers: tuple[Layer, ...]
    model_type: str
    activation: str
    """Of the feed-forward parts, by the name in the model's configuration."""
    sdpa: bool
    """Whether the model takes torch's attention; it is eager else."""
    softcap: bool
    """Whether its attention scores go through a hyperbolic tangent."""

    @property
    def trained(self) -> int:
        """Trained elements."""
        return sum(weight.elements for weight in self.weights if weight.trained)

    @property
    def frozen(self) -> int:
        """Frozen elements."""
        return sum(weight.elements for weight in self.weights if not weight.trained)


def read_shapes(
    model_config: Any, section: ModelSection, lora: LoraSection | None, *, vocabulary_at_least: int = 0
) -> Shapes:
    """Build the empty model, put the adapter on, and read it; `lora` None means that all weights are trained.

    `vocabulary_at_least` is the tokenizer's size, by which the embedding may grow.
    """
    from accelerate import init_empty_weights

    from trainer.adapt import apply_adapter
    from trainer.model import empty_model

    model = empty_model(model_config, section)
    model.tie_weights()  # accelerate replaces each Parameter by an empty one of its own
    tied = bool(getattr(model_config.get_text_config(), "tie_word_embeddings", False))
    head, sdpa = model.get_output_embeddings(), bool(require(model, "_supports_sdpa", "transformers"))
    hidden, rows = _embedding(model)
    if lora is not None:
        # A model can be read without the files of an adapter that it starts from: r and targets are in the settings.
        fresh = lora.model_copy(update={"adapter_path": None, "init": "default"})
        with init_empty_weights():
            model = apply_adapter(model, fresh, torch.float32)
    blocks = decoder_layers(model)
    weights = tuple(_weights(model, blocks, head))
    grown = max(0, vocabulary_at_least - rows)
    if grown:
        per_row = hidden * (1 if tied else 2)
        weights = (*weights, Weight(grown * per_row, packable=False, trained=False, layer=-1))
    return Shapes(
        hidden=hidden,
        vocabulary=rows + grown,
        tied=tied,
        weights=weights,
        layers=tuple(_layer(block, hidden) for block in blocks),
        model_type=str(model_config.model_type),
        activation=str(getattr(model_config.get_text_config(), "hidden_act", "")),
        sdpa=sdpa,
        softcap=getattr(model_config.get_text_config(), "attn_logit_softcapping", None) is not None,
    )


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The modules of the ModuleList that holds the most parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    sizes = [sum(parameter.numel() for parameter in blocks.parameters()) for blocks in lists]
    return list(lists[sizes.index(max(sizes))]) if lists else []


def _embedding(model: Any) -> tuple[int, int]:
    weight = model.get_input_embeddings().weight
    return int(weight.shape[1]), int(weight.shape[0])


def _weights(model: nn.Module, blocks: list[nn.Module], head: nn.Module | None) -> Iterator[Weight]:
    layer_of = {id(parameter): index for index, block in enumerate(blocks) for parameter in block.parameters()}
    packable = {id(module.weight) for module in model.modules() if is_linear(module) and module is not head}
    for name, parameter in model.named_parameters():
        yield Weight(
            elements=parameter.numel(),
            packable=id(parameter) in packable and not parameter.requires_grad,
            trained=parameter.requires_grad,
            layer=layer_of.get(id(parameter), -1),
            factor="lora_" in name,
        )


def _layer(block: nn.Module, hidden: int) -> Layer:
    mixers = []
    for module in block.modules():
        projections = _projections(module)
        if projections:
            mixers.append(_mixer(module, projections))
    norms = sum(
        "Norm" in type(child).__name__ and weight.numel() == hidden
        for child in block.children()
        if isinstance(weight := getattr(child, "weight", None), nn.Parameter)
    )
    return Layer(hidden, norms, tuple(mixers))


def _projections(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The linear layers that a module holds directly, adapted or not."""
    from peft.tuners.lora import LoraLayer

    if isinstance(module, LoraLayer | nn.ModuleDict):
        return []  # what it holds is its own base and factors
    return [(name, child) for name, child in module.named_children() if isinstance(child, nn.Linear | LoraLayer)]


def _mixer(module: nn.Module, projections: list[tuple[str, nn.Module]]) -> Mixer:
    outputs = [child for name, child in projections if name in OUTPUTS] or [projections[-1][1]]
    inputs = [child for _, child in projections if child not in outputs] or outputs
    width_projected = sum(_shape(child)[0] for child in inputs)
    width_inner = sum(_shape(child)[1] for child in outputs)
    head = int(getattr(module, "head_dim", 0) or 0)
    if hasattr(module, "conv1d"):
        kind = "recurrent"
    elif head or "Attention" in type(module).__name__:
        kind = "attention"
    else:
        kind = "gated" if width_projected >= 2 * width_inner else "plain"
    inner_norms = [child for name, child in module.named_children() if "Norm" in type(child).__name__]
    return Mixer(
        kind=kind,
        width_in=_shape(inputs[0])[1],
        width_projected=width_projected,
        width_inner=width_inner,
        heads=width_inner // head if head else 0,
        trained_in=any(_is_trained(child) for child in inputs),
        trained_out=any(_is_trained(child) for child in outputs),
        ranks=sum(_padded(_rank(child)) for _, child in projections),
        norm_width=width_projected if inner_norms and kind == "attention" else 0,
        largest_weight=max(_shape(child)[0] * _shape(child)[1] for _, child in projections),
        copied=(width_projected + width_inner) // 2 if kind == "attention" and len(inputs) == 1 else 0,
        scan=_scan(module) if kind == "recurrent" else 0,
    )


def _scan(module: Any) -> int:
    """3 chunk x heads + 5 heads x state: what the chunked scan of Mamba-2 keeps per token in transformers' own code."""
    heads, state = getattr(module, "num_heads", 0), getattr(module, "ssm_state_size", 0)
    return int(3 * getattr(module, "chunk_size", 0) * heads + 5 * heads * state)


def _shape(linear: Any) -> tuple[int, int]:
    return int(linear.out_features), int(linear.in_features)


def _is_trained(linear: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in linear.parameters())


def _rank(linear: Any) -> int:
    ranks = getattr(linear, "r", None)
    return int(max(ranks.values(), default=0)) if isinstance(ranks, dict) else 0


def _padded(rank: int) -> int:
    return -(-rank // SMALL_RANK_STEP) * SMALL_RANK_STEP
