"""Loading of weights module by module: quantised or kept as stored, and partitioned under ZeRO-3.

transformers skips `zero.Init` for quantised models (every rank would hold the whole 4-bit model) and otherwise reads
the whole checkpoint into the memory of rank 0. Here rank 0 reads one module's tensors and broadcasts them, every rank
quantises them (the same input gives the same bits), and DeepSpeed keeps this rank's shard before the next is read.
Peak memory of a rank: its shard of the model and one module in full precision.
"""

import copy
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

import ops
from trainer.config import ModelSection, QuantizationSection
from trainer.contract.known_versions import require
from trainer.contract.replacements import replaces
from trainer.model.eight_bit import FrozenLinear8bit, check_card
from trainer.model.four_bit import quantized_linear, should_quantize
from trainer.model.frozen_experts import compute_dequantized
from trainer.model.model_kind import auto_class, has_score, is_mxfp4, output_layer
from trainer.model.mxfp4 import full_precision
from trainer.model.packed_experts import ExpertsLayout, PackedExperts, eight_bit_layout, mxfp4_layout, nf4_layout
from trainer.model.published_shapes import is_random
from trainer.model.random_weights import RandomTensors, WithScore
from trainer.model.stored_fp8 import Block, Fp8Files, fp8_form
from trainer.model.stored_layout import BLOCKS, SCALES, Stored, StoredTensors, stored_layout
from trainer.model.tensor_files import SafetensorsFiles
from trainer.model.weights_fit import check_weights_fit
from trainer.parallel.engine.kept_types import find_fp32_names, widen_fp32_weights
from trainer.parallel.engine.layer_gather.shards import LayerShards
from trainer.parallel.engine.linear_layers import find_expert_weights, is_transposed

Tensors = SafetensorsFiles | RandomTensors | Fp8Files | WithScore


@replaces("modules and parameters of the empty model")
def load_streamed(
    base_model: str,
    section: ModelSection,
    config: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str | None,
    quantization: QuantizationSection | None,
    deepspeed_config: dict[str, Any] | None,
    shards: LayerShards | None = None,
    unpack: bool = False,
) -> Any:
    """Build the model without memory, then fill, quantise and partition it one module at a time.

    DeepSpeed partitions each module with `deepspeed_config`; with `shards` each layer is sharded once it is complete.
    MXFP4 and FP8 weights stay as stored unless `unpack`; `quantization` makes products of FP8 layers take 8-bit inputs.
    """
    if quantization is not None and quantization.eight_bit:
        check_card(quantization.quant_type, device)
        if device.type == "cuda":
            ops.load("auto")  # the layers' forward needs an operator: one already loaded, or any available
    model = _build_empty(full_precision(config), section, dtype, attention)
    files: Tensors
    if is_random(base_model):
        files = RandomTensors(base_model, model, device, in_mxfp4=is_mxfp4(config))
    else:
        stored = SafetensorsFiles(base_model, section)
        check_weights_fit(f"base_model={base_model}", type(model), config, stored)
        form = fp8_form(config)
        files = stored if form is None else Fp8Files(stored, form)
        files = WithScore(files, config) if has_score(config) else files
    layout = stored_layout(model, files, base_model)
    if shards is not None:
        shards.plan(model)
    fill(
        model,
        files,
        layout,
        dtype=dtype,
        device=device,
        quantization=quantization,
        deepspeed_config=deepspeed_config,
        shards=shards,
        unpack=unpack,
    )
    # PEFT reads it.
    model.is_loaded_in_4bit = quantization is not None and not quantization.eight_bit
    if quantization is not None and not quantization.eight_bit:
        model.config.quantization_config = _quantization_record(quantization, dtype)
        model.is_quantized = True
        model.quantization_method = "bitsandbytes"
    return model


def _build_empty(config: Any, section: ModelSection, dtype: torch.dtype, attention: str | None) -> Any:
    """Return the model without memory for its weights, with the dtypes and buffers of `from_pretrained`."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = auto_class(config).from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=section.trust_remote_code
        )
    model.tie_weights()
    widen_fp32_weights(model, dtype)
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    innermost = {module: part for part in parts for module in part.modules()}
    for module, part in innermost.items():
        if require(module, "_non_persistent_buffers_set", "torch"):
            # `from_config` computes position tables in the 16-bit dtype of the weights; initialise them again.
            require(part, "_init_weights", "transformers")(module)
    return model


def fill(
    model: Any,
    files: StoredTensors,
    layout: dict[str, Stored],
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: QuantizationSection | None,
    deepspeed_config: dict[str, Any] | None,
    shards: LayerShards | None = None,
    unpack: bool = False,
) -> None:
    """Fill an empty model one module at a time: weights are read by one rank, then quantised, partitioned or sharded.

    Models of transformers keep the dtype of each parameter; others get all weights in `dtype`.
    """
    is_typed = isinstance(model, PreTrainedModel)
    output_head = output_layer(model)
    wide = find_fp32_names(model, torch.float16)  # of layers that stay unquantised in training of any precision
    filled: dict[int, nn.Parameter] = {}  # tied weights are one parameter under several names
    fp8 = files if isinstance(files, Fp8Files) and not unpack else None
    to_quantize = quantization if fp8 is None else None
    quantised: dict[int, nn.Module] = {}
    for path, module in list(model.named_modules()):
        weight = id(getattr(module, "weight", None))
        is_layer = should_quantize(path, module) and module is not output_head
        is_layer = is_layer and (wide is None or not wide.search(_join(path, "weight")))
        kept = fp8.block(layout[_join(path, "weight")], 2) if fp8 is not None and is_layer else None
        to_pack = _layouts_to_pack(module, path, layout, to_quantize, dtype, unpack, fp8)
        for name, parameter in list(module.named_parameters(recurse=False)):
            if kept is not None and name == "weight":
                continue
            if id(parameter) not in filled:
                stored = layout[_join(path, name)]
                if name in to_pack:
                    filled[id(parameter)] = _broadcast_packed(files, stored, to_pack[name], device)
                else:
                    value = _broadcast(files, stored, parameter, device)
                    own = parameter.dtype if is_typed else dtype
                    filled[id(parameter)] = nn.Parameter(value.to(own), requires_grad=parameter.requires_grad)
            setattr(module, name, filled[id(parameter)])
        if to_pack:
            compute_dequantized(module)
        _load_buffers(module, path, layout, files, device)
        if fp8 is not None and kept is not None:
            parts = _broadcast_fp8(fp8, layout[_join(path, "weight")], module, kept, device)
            module = FrozenLinear8bit(module, *parts, kept, compute_dtype=dtype, exact=quantization is None)
            _replace(model, path, module)
        elif to_quantize is not None and is_layer:
            module = quantised[weight] = _quantise(module, to_quantize, dtype, quantised.get(weight))
            _replace(model, path, module)
        if deepspeed_config is not None:
            _partition(module, deepspeed_config)
        if shards is not None:
            shards.cut_if_whole(model, path)
    model.eval()


def _quantise(linear: Any, quantization: QuantizationSection, dtype: torch.dtype, tied: nn.Module | None) -> nn.Module:
    """Return the layer in 8 or 4 bits; if `tied` to a layer already quantised, it shares the weight of that."""
    if tied is not None:
        twin = copy.copy(tied)
        twin.__dict__["_parameters"] = dict(tied.named_parameters(recurse=False)) | {"bias": linear.bias}
        return twin
    if quantization.eight_bit:
        return FrozenLinear8bit.quantized(linear, quantization.quant_type, dtype)
    return quantized_linear(linear, quantization, compute_dtype=dtype)


def _layouts_to_pack(
    module: nn.Module,
    path: str,
    layout: dict[str, Stored],
    quantization: QuantizationSection | None,
    dtype: torch.dtype,
    unpack: bool,
    fp8: Fp8Files | None,
) -> dict[str, ExpertsLayout]:
    """Return the layouts of a module's expert tensors that will be packed, by name."""
    found, transposed = {}, is_transposed(module)
    for name, experts in find_expert_weights(module).items():
        if layout[_join(path, name)].is_mxfp4:
            if not unpack:
                found[name] = mxfp4_layout(experts.shape, dtype)
        elif fp8 is not None:
            if (cell := _common_block(fp8, module, path, layout)) is not None:
                own = (1, experts.shape[1 if transposed else 2]) if cell[1] == 0 else cell
                found[name] = eight_bit_layout(experts.shape, "fp8", dtype, transposed=transposed, cell=own)
        elif quantization is not None and quantization.eight_bit:
            found[name] = eight_bit_layout(experts.shape, quantization.quant_type, dtype, transposed=transposed)
        elif quantization is not None:
            found[name] = nf4_layout(experts.shape, quantization, dtype, transposed=transposed)
    return found


def _common_block(fp8: Fp8Files, module: nn.Module, path: str, layout: dict[str, Stored]) -> Block | None:
    """Return the block per scale common to all tensors of these experts, (1, 0) for rows; None to dequantise them."""
    shapes = {name: experts.shape for name, experts in find_expert_weights(module).items()}
    found = {name: fp8.block(layout[_join(path, name)], 3) for name in shapes}
    cells = [cell for cell in found.values() if cell is not None]
    if len(cells) < len(found):
        return None
    if all(cell == (1, shapes[name][2]) for name, cell in found.items()):
        return None if is_transposed(module) else (1, 0)
    rows, cols = (gcd(*sizes) for sizes in zip(*cells, strict=True))
    return (rows, cols) if rows == cols or not is_transposed(module) else None


def _partition(module: nn.Module, deepspeed_config: dict[str, Any]) -> None:
    import deepspeed

    own = nn.Module()  # only this module's own parameters: children are partitioned separately
    for name, parameter in module.named_parameters(recurse=False):
        own.register_parameter(name, parameter)
    if any(True for _ in own.parameters()):
        deepspeed.zero.Init(module=own, config_dict_or_path=deepspeed_config)


def _broadcast(files: StoredTensors, stored: Stored, parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    """Return the tensor on every rank; only rank 0 reads it from disk."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return _read(files, stored, parameter, device)
    if dist.get_rank() == 0:
        value = _read(files, stored, parameter, device).to(parameter.dtype).contiguous()
    else:
        value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    dist.broadcast(value, src=0)
    return value


def _read(files: StoredTensors, stored: Stored, parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    if stored.is_mxfp4:
        return _packed(files, stored, mxfp4_layout(parameter.shape, parameter.dtype), device).dequantized()
    if parameter.dim() < 3 or not stored.by_expert:
        return stored.read(files).to(device)
    value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    for index in range(parameter.shape[0]):
        value[index] = stored.read(files, index)[0]
    return value


def _broadcast_fp8(
    files: Fp8Files, stored: Stored, linear: nn.Module, block: Block, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of a linear layer on every rank; only rank 0 reads them from disk."""
    assert isinstance(linear, nn.Linear)
    shape = linear.weight.shape
    grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() > 0:
        codes = torch.empty(shape, dtype=torch.uint8, device=device)
        scales = torch.empty(grid, dtype=torch.float32, device=device)
    else:
        codes = files.codes(stored).to(device).contiguous()
        scales = files.scales(stored, block).to(device).contiguous()
        assert (codes.shape, tuple(scales.shape)) == (shape, grid), f"{stored.target}: {codes.shape}, {scales.shape}"
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(codes, src=0)
        dist.broadcast(scales, src=0)
    return codes, scales


def _packed(files: StoredTensors, stored: Stored, layout: ExpertsLayout, device: torch.device) -> PackedExperts:
    """Pack experts one at a time: quantised, or MXFP4 or FP8 as stored."""
    packed = PackedExperts.empty(layout, device)
    if isinstance(files, Fp8Files):
        _put_fp8(files, stored, packed)
        return packed
    if stored.is_mxfp4:
        sections = packed.sections()
        for index in range(layout.experts):
            sections["codes"][index] = files.read(stored.names[BLOCKS][0], index).reshape(-1)
            sections["scales"][index] = files.read(stored.names[SCALES][0], index).reshape(-1)
        return packed
    whole = None if stored.by_expert else stored.read(files)
    for index in range(layout.experts):
        matrix = stored.read(files, index)[0] if whole is None else whole[index]
        packed.quantize(index, matrix.to(device))
    return packed


def _put_fp8(files: Fp8Files, stored: Stored, packed: PackedExperts) -> None:
    layout = packed.packing
    for index in range(layout.experts) if stored.by_expert else [None]:
        codes, scales = files.codes(stored, index), files.scales(stored, layout.cell, index)
        if layout.transposed:
            codes, scales = codes.mT, scales.mT
        for offset, parts in enumerate(zip(codes, scales, strict=True)):
            packed.put_expert((index or 0) + offset, *parts)


def _broadcast_packed(
    files: StoredTensors, stored: Stored, layout: ExpertsLayout, device: torch.device
) -> PackedExperts:
    """Return the packed experts on every rank; only rank 0 reads and packs them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return _packed(files, stored, layout, device)
    first = dist.get_rank() == 0
    packed = _packed(files, stored, layout, device) if first else PackedExperts.empty(layout, device)
    dist.broadcast(packed.data, src=0)
    return packed


def _load_buffers(
    module: nn.Module, path: str, layout: dict[str, Stored], files: StoredTensors, device: torch.device
) -> None:
    for name, buffer in list(module.named_buffers(recurse=False)):
        stored = layout.get(_join(path, name))
        value = buffer if stored is None else stored.read(files).to(buffer.dtype)
        module._buffers[name] = value.to(device)


def _quantization_record(quantization: QuantizationSection, dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization.quant_type,
        bnb_4bit_use_double_quant=quantization.double_quant,
        bnb_4bit_compute_dtype=dtype,
    )


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent) if parent else model, name, module)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
