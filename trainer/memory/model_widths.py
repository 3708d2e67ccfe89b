"""Extraction of a model's tensors and layer widths for the memory estimate.

Nothing is loaded: the real modules, with PEFT's adapter, are built on torch's meta device.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trainer.config import LoraSection, ModelSection
from trainer.memory.observed import leaves_layout, observe_activation, observe_norm, read_experts
from trainer.memory.widths import Layer, Mixer, NormBytes, Shapes, Weight
from trainer.model.adapter import apply_adapter
from trainer.model.base import empty_model
from trainer.model.expert_layers import holds_experts
from trainer.model.model_kind import caps_scores, is_mxfp4
from trainer.model.stored_fp8 import Fp8Form, fp8_form
from trainer.parallel.engine.linear_layers import find_expert_weights, is_linear, is_transposed
from trainer.patches.model_properties import CAPPED, inspect_base_model, why_head_apart

# The projections that read a result of their block; all others read the block's input.
OUTPUTS = ("o_proj", "out_proj", "down_proj", "output_linear", "dense_4h_to_h", "c_proj", "fc2", "w2", "wo", "dense")
SMALL_RANK_STEP = 8  # the operators pad the rank of each adapter to a multiple of this


def read_shapes(
    model_config: Any, section: ModelSection, lora: LoraSection | None, *, vocabulary_at_least: int = 0
) -> Shapes:
    """Build the empty model with its adapter and read its shapes; without `lora`, all weights are trained.

    `vocabulary_at_least` is the size of the tokenizer, to which the embedding may be enlarged.
    """
    from accelerate import init_empty_weights

    fp8, in_mxfp4 = fp8_form(model_config), is_mxfp4(model_config)
    model = empty_model(model_config, section)
    tied = bool(getattr(model_config.get_text_config(), "tie_word_embeddings", False))
    head, facts = model.get_output_embeddings(), inspect_base_model(model, frozen_norms=lora is not None)
    hidden, rows = _embedding(model)
    if lora is not None:
        # The files of an initial adapter are not needed: the settings have its rank and targets.
        fresh = lora.model_copy(update={"adapter_path": None, "init": "default"})
        with init_empty_weights():
            model = apply_adapter(model, fresh, torch.float32)
    head_apart = why_head_apart(model)
    blocks = decoder_layers(model)
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = [each for each in model.modules() if id(each) not in inside and is_residual_norm(each, hidden)]
    rotary = next((module for name, module in model.named_modules() if name.endswith("rotary_emb")), None)
    weights = tuple(read_weights(model, blocks, head, in_mxfp4=in_mxfp4, fp8=fp8))
    grown = max(0, vocabulary_at_least - rows)
    if grown:
        per_row = hidden * (1 if tied else 2)
        weights = (*weights, Weight(grown * per_row, packable=False, trained=False, layer=-1))
    return Shapes(
        hidden=hidden,
        vocabulary=rows + grown,
        tied=tied,
        weights=weights,
        norm=_norm_bytes(outside, hidden),
        layers=tuple(_layer(block, hidden, rotary=rotary, packed=in_mxfp4 or fp8 is not None) for block in blocks),
        facts=replace(facts, head=head_apart, caps=head_apart == CAPPED),
        softcap=caps_scores(model_config),
        fp8="" if fp8 is None else "rows" if fp8.block is None else "blocks",
    )


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the ModuleList with the most parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    sizes = [sum(parameter.numel() for parameter in blocks.parameters()) for blocks in lists]
    return list(lists[sizes.index(max(sizes))]) if lists else []


def _embedding(model: Any) -> tuple[int, int]:
    weight = model.get_input_embeddings().weight
    return int(weight.shape[1]), int(weight.shape[0])


def read_weights(
    model: nn.Module, blocks: list[nn.Module], head: nn.Module | None, *, in_mxfp4: bool, fp8: Fp8Form | None = None
) -> Iterator[Weight]:
    """Return every parameter with the index of its block; `fp8` is the FP8 storage format, if any."""
    layer_of = {id(parameter): index for index, block in enumerate(blocks) for parameter in block.parameters()}
    held = {
        path: module
        for path, module in model.named_modules()
        if fp8 is None or fp8.holds(path.removeprefix("base_model.model.").replace(".base_layer", ""))
    }
    packable = {id(module.weight) for module in held.values() if is_linear(module) and module is not head}
    experts = {id(each): len(each) for module in model.modules() for each in find_expert_weights(module).values()}
    packable |= {id(each) for module in held.values() for each in find_expert_weights(module).values()}
    transposed = {
        id(each) for module in held.values() if is_transposed(module) for each in find_expert_weights(module).values()
    }
    for name, parameter in model.named_parameters():
        frozen = id(parameter) in packable and not parameter.requires_grad
        matrix = parameter.mT if id(parameter) in transposed else parameter
        yield Weight(
            elements=parameter.numel(),
            experts=experts.get(id(parameter), 0),
            mxfp4=in_mxfp4 and id(parameter) in experts,
            packable=frozen,
            trained=parameter.requires_grad,
            layer=layer_of.get(id(parameter), -1),
            factor="lora_" in name,
            rows=matrix.shape[:-1].numel() if parameter.dim() in (2, 3) else 0,
            fp8_scales=_scales(matrix.shape, fp8.block) if fp8 is not None and frozen else 0,
        )


def _scales(shape: torch.Size, block: tuple[int, int] | None) -> int:
    """Return the number of scales stored with a matrix, or with the matrices of all experts."""
    rows, cols = block or (1, shape[-1])
    return shape[:-2].numel() * -(-shape[-2] // rows) * -(-shape[-1] // cols)


def _layer(block: nn.Module, hidden: int, *, rotary: nn.Module | None, packed: bool) -> Layer:
    mixers = []
    for module in block.modules():
        projections = _projections(module)
        if projections:
            mixers.append(_mixer(module, projections, rotary=rotary))
        if holds_experts(module):
            mixers.append(replace(read_experts(block, module, hidden), packed=packed))
    norms = [child for child in block.children() if is_residual_norm(child, hidden)]
    return Layer(hidden, _norm_bytes(norms, hidden), tuple(mixers))


def _norm_bytes(norms: list[nn.Module], hidden: int) -> NormBytes:
    kept = [observe_norm(norm, hidden) for norm in norms]
    return NormBytes(len(norms), sum(each[2] for each in kept), sum(each[4] for each in kept))


def is_residual_norm(module: nn.Module, hidden: int) -> bool:
    """Return whether a module is a norm over the residual stream."""
    weight = getattr(module, "weight", None)
    return "Norm" in type(module).__name__ and isinstance(weight, nn.Parameter) and weight.numel() == hidden


def _projections(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the linear layers, adapted or not, that are direct children of a module."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    if isinstance(module, LoraLayer | nn.ModuleDict):
        return []  # its children are its own base layer and factors
    linear = nn.Linear | LoraLayer
    children = [(name, child) for name, child in module.named_children() if isinstance(child, linear)]
    return [(name, child) for name, child in children if not isinstance(child, ParamWrapper)]


def _mixer(module: nn.Module, projections: list[tuple[str, nn.Module]], *, rotary: nn.Module | None) -> Mixer:
    outputs = [child for name, child in projections if name in OUTPUTS] or [projections[-1][1]]
    inputs = [child for _, child in projections if child not in outputs] or outputs
    width_projected = sum(_shape(child)[0] for child in inputs)
    width_inner = sum(_shape(child)[1] for child in outputs)
    head = int(getattr(module, "head_dim", 0) or getattr(module, "head_size", 0) or 0)
    if hasattr(module, "conv1d"):
        kind = "recurrent"
    elif head or "Attention" in type(module).__name__:
        kind = "attention"
    else:
        kind = "gated" if width_projected >= 2 * width_inner else "plain"
    fused = len(inputs) == 1 and rotary is not None
    inner_norms = [each for each in module.named_children() if "Norm" in type(each[1]).__name__]
    return Mixer(
        kind=kind,
        width_in=_shape(inputs[0])[1],
        width_projected=width_projected,
        width_inner=width_inner,
        heads=width_inner // head if head else 0,
        trained_in=any(_is_trained(child) for child in inputs),
        trained_out=any(_is_trained(child) for child in outputs),
        ranks=sum(_padded(_rank(child)) for _, child in projections),
        norm_width=sum(_norm_width(module, *each, head) for each in inner_norms) if kind == "attention" else 0,
        largest_weight=max(_shape(child)[0] * _shape(child)[1] for _, child in projections),
        copied=_copied(module, (width_projected + width_inner) // 2 if fused else 0) if kind == "attention" else 0,
        own_softmax=isinstance(getattr(module, "sinks", None), nn.Parameter),
        relaid=kind == "attention" and (hasattr(module, "kv_b_proj") or _is_relaid(module, rotary, head)),
        scan=_scan(module) if kind == "recurrent" else 0,
        activated=observe_activation(module) if kind in ("gated", "plain") else 0.0,
    )


def _norm_width(module: nn.Module, name: str, norm: Any, head: int) -> int:
    """Return the input width of a norm within attention: its own, or all heads of the projection it belongs to."""
    weight = getattr(norm, "weight", None)
    own = weight.numel() if isinstance(weight, nn.Parameter) else head
    projection = getattr(module, f"{name[0]}_proj", None)
    return own if own != head or projection is None else _shape(projection)[0]


def _copied(module: Any, out_of_one: int) -> int:
    """Return the width of copied heads: rotated q and k of a fused projection, or concatenated keys in MLA."""
    if not hasattr(module, "kv_b_proj"):
        return out_of_one
    return int(module.num_heads * module.qk_head_dim - module.qk_rope_head_dim)


def _is_relaid(module: nn.Module, rotary: nn.Module | None, head: int) -> bool:
    frequencies = list(rotary.buffers(recurse=False)) if rotary is not None else []
    if not frequencies or not head:
        return False
    rotated = 2 * frequencies[0].numel()  # elements of a head; the rest is concatenated to the rotated ones
    return rotated < head or not leaves_layout(module, rotated, head)


def _scan(module: Any) -> int:
    """Return 3 chunk x heads + 5 heads x state: elements per token kept by transformers' chunked Mamba-2 scan."""
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
