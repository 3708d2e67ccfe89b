"""Extract a model's tensors and layers for the memory estimate.

No weights are loaded: the modules, with PEFT's adapter, are built on torch's meta device.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trainer.config import LoraSection, ModelSection
from trainer.memory.observed import empty_duplicate_layers
from trainer.memory.stored_weights import ModelShapes, Weight
from trainer.model.adapter import apply_empty_adapter
from trainer.model.base import build_empty_model
from trainer.model.model_kind import find_output_layer, is_mxfp4
from trainer.model.reached_layers import find_decoder_layers
from trainer.model.stored_settings import StoredFormat, find_stored_format
from trainer.parallel.engine.linear_layers import find_expert_weights, is_linear, is_transposed
from trainer.patches.model_properties import CAPPED, describe_head_problem, inspect_base_model


def read_shapes(
    model_config: Any, section: ModelSection, lora: LoraSection | None, *, min_vocabulary_size: int = 0
) -> ModelShapes:
    """Build the model and its adapter on the meta device, and return their tensors and layers.

    Without `lora`, all weights are trained. The embedding has at least `min_vocabulary_size` rows (for the tokenizer).
    """
    from accelerate import init_empty_weights

    stored, in_mxfp4 = find_stored_format(model_config), is_mxfp4(model_config)
    model = build_empty_model(model_config, section)
    tied = bool(getattr(model_config.get_text_config(), "tie_word_embeddings", False))
    head, properties = find_output_layer(model), inspect_base_model(model, frozen_norms=lora is not None)
    rows, hidden = model.get_input_embeddings().weight.shape
    if lora is not None:
        with init_empty_weights():
            model = apply_empty_adapter(model, lora, torch.float32)
    unfused_head = describe_head_problem(model)
    blocks = list(find_decoder_layers(model)[1])
    weights = tuple(read_weights(model, blocks, head, in_mxfp4=in_mxfp4, stored=stored))
    if new_rows := max(0, min_vocabulary_size - rows):
        per_row = hidden * (1 if tied else 2)
        weights = (*weights, Weight(new_rows * per_row, packable=False, trained=False, layer=-1))
    return ModelShapes(
        hidden=hidden,
        vocabulary=rows + new_rows,
        weights=weights,
        layers=empty_duplicate_layers(blocks),
        properties=replace(properties, head=unfused_head, caps=unfused_head == CAPPED),
        model=model,
        stored="" if stored is None else stored.scale_granularity,
    )


def read_weights(
    model: nn.Module, blocks: list[nn.Module], head: nn.Module | None, *, in_mxfp4: bool,
    stored: StoredFormat | None = None,
) -> Iterator[Weight]:  # fmt: skip
    """Yield each parameter as a `Weight` with its block's index. `stored` is the checkpoint's quantized format."""
    stored_bits = 0 if stored is None else 4 if stored.scale_granularity == "groups" else 8
    layer_indices = {id(parameter): index for index, block in enumerate(blocks) for parameter in block.parameters()}
    modules = [
        module
        for path, module in model.named_modules()
        if stored is None or stored.is_quantized(path.removeprefix("base_model.model.").replace(".base_layer", ""))
    ]
    packable = {id(module.weight) for module in modules if is_linear(module) and module is not head}
    experts = {id(weight): len(weight) for module in model.modules() for weight in find_expert_weights(module).values()}
    transposed: set[int] = set()
    for module in modules:
        expert_ids = {id(weight) for weight in find_expert_weights(module).values()}
        packable |= expert_ids
        transposed |= expert_ids if is_transposed(module) else set()
    for name, parameter in model.named_parameters():
        frozen = id(parameter) in packable and not parameter.requires_grad
        matrix = parameter.mT if id(parameter) in transposed else parameter
        yield Weight(
            elements=parameter.numel(),
            experts=experts.get(id(parameter), 0),
            mxfp4=in_mxfp4 and id(parameter) in experts,
            packable=frozen,
            trained=parameter.requires_grad,
            layer=layer_indices.get(id(parameter), -1),
            factor="lora_" in name,
            rows=matrix.shape[:-1].numel() if parameter.dim() in (2, 3) else 0,
            stored_bits=stored_bits if frozen else 0,
            stored_scales=stored.count_scale_bytes(matrix.shape) if stored is not None and frozen else 0,
        )
