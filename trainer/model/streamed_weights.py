"""Load weights module by module, quantized or as stored, and partition them under ZeRO-3.

transformers skips `zero.Init` for quantized models (every rank would load the whole 4-bit model) and otherwise reads
the whole checkpoint into the memory of rank 0. Here rank 0 reads the tensors of one module and broadcasts them, every
rank quantizes them deterministically, and DeepSpeed frees all but the rank's shard before the next module is read. A
rank needs memory for its shard of the model and one module in full precision.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel

import ops
from trainer.config import ModelSection, QuantizationSection
from trainer.contract.known_versions import replaces, require
from trainer.model.eight_bit import FrozenLinear8bit, check_fp8_support
from trainer.model.four_bit import UNQUANTIZED_LAYERS, quantize_linear
from trainer.model.model_kind import find_output_layer, get_auto_class, has_score_head, is_mxfp4
from trainer.model.mxfp4 import MXFP4, strip_quantization
from trainer.model.packed_experts import (
    GROUPED,
    ExpertsLayout,
    FrozenLinearGrouped,
    PackedExperts,
    build_experts_layout,
    install_dequantized_forward,
)
from trainer.model.published_shapes import is_random
from trainer.model.random_weights import RandomTensors, TensorsWithScore
from trainer.model.stored_four_bit import FourBitFiles, FourBitFormat
from trainer.model.stored_fp8 import Block, Fp8Files
from trainer.model.stored_layout import BLOCKS, SCALES, StoredParameter, StoredTensors, map_stored_tensors
from trainer.model.stored_settings import find_stored_format
from trainer.model.tensor_files import SafetensorsFiles
from trainer.model.weights_fit import check_weights_fit
from trainer.parallel.engine.kept_types import convert_fp32_weights, find_fp32_names
from trainer.parallel.engine.layer_gather.shards import LayerShards
from trainer.parallel.engine.linear_layers import find_expert_weights, is_linear, is_transposed


@replaces("modules and parameters of a model on the meta device")
def load_model_by_module(
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
    """Build the model on the meta device, then fill, quantize and partition it one module at a time.

    With `deepspeed_config` DeepSpeed partitions each module; with `shards` each layer is sharded once it is complete.
    4-bit and FP8 weights stay as stored unless `unpack` is set. With `quantization`, stored FP8 layers run their
    matmuls in 8 bits.
    """
    if quantization is not None and quantization.is_8bit:
        check_fp8_support(quantization.quant_type, device)
        if device.type == "cuda":
            ops.load_backend("auto")  # the layers' forward pass needs an operator
    model = _build_empty(strip_quantization(config), section, dtype, attention)
    files: StoredTensors
    if is_random(base_model):
        files = RandomTensors(base_model, model, device, in_mxfp4=is_mxfp4(config))
    else:
        stored = SafetensorsFiles(base_model, section)
        check_weights_fit(f"base_model={base_model}", type(model), config, stored)
        format_ = find_stored_format(config)
        if isinstance(format_, FourBitFormat):
            files = FourBitFiles(stored, format_, f"base_model={base_model}")
        else:
            files = stored if format_ is None else Fp8Files(stored, format_)
        files = TensorsWithScore(files, config) if has_score_head(config) else files
    layout = map_stored_tensors(model, files, base_model)
    Filler(model, files, layout, dtype, device, quantization, unpack).fill(deepspeed_config, shards)
    # PEFT reads this attribute.
    model.is_loaded_in_4bit = quantization is not None and not quantization.is_8bit
    if quantization is not None and not quantization.is_8bit:
        model.config.quantization_config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quantization.quant_type,
            bnb_4bit_use_double_quant=quantization.double_quant,
            bnb_4bit_compute_dtype=dtype,
        )
        model.is_quantized = True
        model.quantization_method = "bitsandbytes"
    return model


def _build_empty(config: Any, section: ModelSection, dtype: torch.dtype, attention: str | None) -> Any:
    """Build the model with weights on the meta device; dtypes and buffers are the same as with `from_pretrained`."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = get_auto_class(config).from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=section.trust_remote_code
        )
    model.tie_weights()
    convert_fp32_weights(model, dtype)
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    innermost = {module: part for part in parts for module in part.modules()}
    for module, part in innermost.items():
        if require(module, "_non_persistent_buffers_set", "torch"):
            # `from_config` computes position tables in the weights' 16-bit dtype; recompute them.
            require(part, "_init_weights", "transformers")(module)
    return model


@dataclass
class Filler:
    """Fills a model on the meta device one module at a time.

    Rank 0 reads the weights; all ranks quantize, partition or shard them. In transformers models, every parameter keeps
    its dtype; in other models, all weights are converted to `dtype`.
    """

    model: Any
    files: StoredTensors
    layout: dict[str, StoredParameter]
    dtype: torch.dtype
    device: torch.device
    quantization: QuantizationSection | None
    unpack: bool = False

    def __post_init__(self) -> None:
        self._is_typed = isinstance(self.model, PreTrainedModel)
        self._head = find_output_layer(self.model)
        # Names of weights that stay in fp32, unquantized, at any precision.
        self._fp32_names = find_fp32_names(self.model, torch.float16)
        stored = self.files.stored if isinstance(self.files, TensorsWithScore) else self.files
        self._fp8 = stored if isinstance(stored, Fp8Files) and not self.unpack else None
        self._four_bit = stored if isinstance(stored, FourBitFiles) and not self.unpack else None
        self._to_quantize = self.quantization if self._fp8 is None and self._four_bit is None else None
        self._filled: dict[int, nn.Parameter] = {}  # by id of the empty parameter; tied weights share it
        self._quantized: dict[int, nn.Module] = {}

    def fill(self, deepspeed_config: dict[str, Any] | None = None, shards: LayerShards | None = None) -> None:
        """Fill every module, and partition it with DeepSpeed or `shards` if one of them is given."""
        if shards is not None:
            shards.plan(self.model)
        for path, module in list(self.model.named_modules()):
            filled = self._fill_module(path, module)
            if filled is not module:
                parent, _, name = path.rpartition(".")
                setattr(self.model.get_submodule(parent), name, filled)
            if deepspeed_config is not None:
                _partition(filled, deepspeed_config)
            if shards is not None:
                shards.shard_if_filled(self.model, path)
        self.model.eval()

    def _fill_module(self, path: str, module: Any) -> nn.Module:
        """Fill the module's direct parameters and buffers. Return the module, or the packed layer that replaces it."""
        stored = {
            name: self.layout[_join_path(path, name)] for name in (*module._parameters, *module._buffers)
            if _join_path(path, name) in self.layout
        }  # fmt: skip
        is_layer = is_linear(module) and path.rpartition(".")[2] not in UNQUANTIZED_LAYERS and module is not self._head
        is_layer = is_layer and (self._fp32_names is None or not self._fp32_names.search(_join_path(path, "weight")))
        block = self._fp8.find_block(stored["weight"], 2) if self._fp8 is not None and is_layer else None
        weight, to_pack = id(getattr(module, "weight", None)), self._plan_packing(module, stored)
        if self._four_bit is not None and is_layer:
            to_pack = self._plan_group_packing({"weight": module.weight}, stored, transposed=False)
        for name, parameter in list(module.named_parameters(recurse=False)):
            if block is not None and name == "weight":
                continue
            if id(parameter) not in self._filled:
                value = self._read_packed(stored[name], to_pack[name]) if name in to_pack else None
                self._filled[id(parameter)] = self._read_plain(stored[name], parameter) if value is None else value
            setattr(module, name, self._filled[id(parameter)])
        if to_pack and not is_layer:
            install_dequantized_forward(module)
        for name, buffer in list(module.named_buffers(recurse=False)):
            content = stored[name].read(self.files).to(buffer.dtype) if name in stored else buffer
            module._buffers[name] = content.to(self.device)
        if block is not None:
            parts, exact = self._read_fp8(stored["weight"], module, block), self.quantization is None
            return FrozenLinear8bit(module, *parts, block, compute_dtype=self.dtype, exact=exact)
        if to_pack and is_layer:
            return FrozenLinearGrouped(module, module.weight)
        if self._to_quantize is None or not is_layer:
            return module
        tied = self._quantized.get(weight)
        self._quantized[weight] = layer = _quantize(module, self._to_quantize, self.dtype, tied)
        return layer

    def _plan_packing(self, module: nn.Module, stored: dict[str, StoredParameter]) -> dict[str, ExpertsLayout]:
        experts, kind, transposed = find_expert_weights(module), self._to_quantize, is_transposed(module)
        cells: dict[str, Block | None] = dict.fromkeys(experts)
        options: dict[str, Any] = {}
        if any(stored[name].is_mxfp4 for name in experts):
            cells = {} if self.unpack else cells
            quant_type, transposed = MXFP4, True
        elif self._four_bit is not None:
            return self._plan_group_packing(experts, stored, transposed=transposed)
        elif self._fp8 is not None:
            cells = _find_shared_block_sizes(self._fp8, experts, stored, transposed)
            quant_type = "fp8"
        elif kind is not None:
            quant_type = kind.quant_type
            options = {} if kind.is_8bit else {"block": kind.block_size, "double_quant": kind.double_quant}
        else:
            return {}
        options |= {"transposed": transposed}
        return {
            name: build_experts_layout(quant_type, experts[name].shape, self.dtype, scale_block=cell, **options)
            for name, cell in cells.items()
        }

    def _plan_group_packing(
        self, weights: Mapping[str, nn.Parameter], stored: dict[str, StoredParameter], *, transposed: bool
    ) -> dict[str, ExpertsLayout]:
        """Return the layouts of weights stored in 4-bit groups; empty if any weight must be dequantized."""
        assert self._four_bit is not None
        layouts: dict[str, ExpertsLayout] = {}
        for name, weight in weights.items():
            groups = self._four_bit.find_layout(stored[name], weight.shape, transposed=transposed)
            if groups is None:
                return {}
            layouts[name] = ExpertsLayout(GROUPED, *groups[:3], self.dtype, transposed, groups=groups)
        return layouts

    def _read_plain(self, stored: StoredParameter, parameter: nn.Parameter) -> nn.Parameter:
        dtype, files = parameter.dtype if self._is_typed else self.dtype, self.files

        def read() -> Tensor:
            if stored.is_mxfp4:
                layout = build_experts_layout(MXFP4, parameter.shape, dtype, transposed=True)
                return _pack(files, stored, layout, self.device).dequantize()
            if parameter.dim() < 3 or not stored.is_separable_by_expert:
                return stored.read(files).to(self.device).to(dtype).contiguous()
            value = torch.empty(parameter.shape, dtype=dtype, device=self.device)
            for index in range(len(parameter)):
                value[index] = stored.read(files, index)[0]
            return value

        value = _broadcast(read, lambda: torch.empty(parameter.shape, dtype=dtype, device=self.device))
        return nn.Parameter(value, requires_grad=parameter.requires_grad)

    def _read_packed(self, stored: StoredParameter, layout: ExpertsLayout) -> PackedExperts:
        """Read and pack experts on rank 0, and broadcast them."""
        empty = partial(PackedExperts.empty, layout, self.device)
        files = self._four_bit or self._fp8 or self.files
        return _broadcast(partial(_pack, files, stored, layout, self.device), empty)

    def _read_fp8(self, stored: StoredParameter, linear: Any, block: Block) -> tuple[Tensor, Tensor]:
        fp8, shape = self._fp8, linear.weight.shape
        assert fp8 is not None
        grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))

        def broadcast(read: Callable[[], Tensor], size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            empty = partial(torch.empty, size, dtype=dtype, device=self.device)
            return _broadcast(lambda: read().to(self.device).contiguous(), empty)

        codes = broadcast(lambda: fp8.read_codes(stored), shape, torch.uint8)
        scales = broadcast(lambda: fp8.read_scales(stored, block), grid, torch.float32)
        assert (codes.shape, tuple(scales.shape)) == (shape, grid), f"{stored.target}: {codes.shape}, {scales.shape}"
        return codes, scales


Read = TypeVar("Read", bound=Tensor)


def _broadcast(read: Callable[[], Read], allocate: Callable[[], Read]) -> Read:
    """Read a tensor on rank 0 and broadcast it. `allocate` allocates it on the other ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return read()
    value = read() if dist.get_rank() == 0 else allocate()
    dist.broadcast(value.data, src=0)
    return value


def _quantize(linear: Any, quantization: QuantizationSection, dtype: torch.dtype, tied: nn.Module | None) -> nn.Module:
    """Quantize a layer to 8 or 4 bits. `tied` is the quantized layer that shares its weight, or None."""
    if tied is not None:
        shared_layer = copy.copy(tied)
        shared_layer.__dict__["_parameters"] = dict(tied.named_parameters(recurse=False)) | {"bias": linear.bias}
        return shared_layer
    if quantization.is_8bit:
        return FrozenLinear8bit.from_linear(linear, quantization.quant_type, dtype)
    return quantize_linear(linear, quantization, compute_dtype=dtype)


def _find_shared_block_sizes(
    fp8: Fp8Files, experts: dict[str, Any], stored: dict[str, StoredParameter], transposed: bool
) -> dict[str, Block | None]:
    """Return one block size (rows, columns) for all expert tensors of a module, by tensor name.

    None as a value means one scale per row. The result is empty if the tensors must be dequantized.
    """
    blocks = {name: fp8.find_block(stored[name], 3) for name in experts}
    cells = [cell for cell in blocks.values() if cell is not None]
    if len(cells) < len(blocks) or not blocks:
        return {}
    if all(cell == (1, experts[name].shape[2]) for name, cell in blocks.items()):
        return {} if transposed else dict.fromkeys(blocks)
    rows, cols = (gcd(*sizes) for sizes in zip(*cells, strict=True))
    return dict.fromkeys(blocks, (rows, cols)) if rows == cols or not transposed else {}


def _partition(module: nn.Module, deepspeed_config: dict[str, Any]) -> None:
    import deepspeed

    childless = nn.Module()  # children are partitioned separately
    for name, parameter in module.named_parameters(recurse=False):
        childless.register_parameter(name, parameter)
    if childless._parameters:
        deepspeed.zero.Init(module=childless, config_dict_or_path=deepspeed_config)


def _pack(files: StoredTensors, stored: StoredParameter, layout: ExpertsLayout, device: torch.device) -> PackedExperts:
    """Pack experts one at a time: quantize 16-bit experts, and copy experts that are stored packed."""
    packed = PackedExperts.empty(layout, device)
    if isinstance(files, Fp8Files):
        for index in range(layout.experts) if stored.is_separable_by_expert else [None]:
            codes, scales = files.read_codes(stored, index), files.read_scales(stored, layout.cell, index)
            if layout.transposed:
                codes, scales = codes.mT, scales.mT
            for offset, parts in enumerate(zip(codes, scales, strict=True)):
                packed.put_expert((index or 0) + offset, *parts)
    elif isinstance(files, FourBitFiles):
        files.fill(stored, packed.sections(), layout.experts, transposed=layout.transposed)
    elif stored.is_mxfp4:
        for index in range(layout.experts):
            codes, scales = (files.read(stored.names[part][0], index).reshape(-1) for part in (BLOCKS, SCALES))
            packed.put_expert(index, codes, scales)
    else:
        tensor = None if stored.is_separable_by_expert else stored.read(files)
        for index in range(layout.experts):
            matrix = stored.read(files, index)[0] if tensor is None else tensor[index]
            packed.quantize(index, matrix.to(device))
    return packed


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
