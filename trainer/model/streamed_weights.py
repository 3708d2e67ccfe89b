"""Weights read from safetensors module by module: quantised to 4 bits, partitioned under ZeRO-3, never whole.

transformers skips `zero.Init` for quantised models (every rank would hold the whole 4-bit model) and, for others, reads
the whole checkpoint into the memory of rank 0. Here rank 0 reads one module's tensors, all ranks receive them, each
quantises alike (the same input gives the same bits), and DeepSpeed keeps this rank's share before the next is read.
Peak memory of a rank: its share of the model and one module in full precision.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.config import ModelSection, QuantizationSection, UserError
from trainer.contract.known_versions import require
from trainer.engine.layer_gather.shards import LayerShards
from trainer.model.four_bit import quantized_linear, should_quantize
from trainer.model.model_kind import auto_class
from trainer.model.published_shapes import is_random
from trainer.model.random_weights import RandomTensors
from trainer.model.tensor_files import SafetensorsFiles
from trainer.model.weights_fit import check_weights_fit

Tensors = SafetensorsFiles | RandomTensors


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
) -> Any:
    """Build the model without memory, then fill, quantise and partition it one module at a time.

    With `deepspeed_config` DeepSpeed partitions each module, with `shards` each layer is cut when it is whole.
    """
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = auto_class(config).from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=section.trust_remote_code
        )
    model.tie_weights()
    files: Tensors
    if is_random(base_model):
        files = RandomTensors(base_model, model, device)
    else:
        files = SafetensorsFiles(base_model, section)
        check_weights_fit(f"base_model={base_model}", type(model), config, files.shapes())
    names = _names_in_checkpoint(model, files, base_model)
    output_head = model.get_output_embeddings()
    if shards is not None:
        shards.plan(model)
    filled: dict[int, nn.Parameter] = {}  # tied weights are one parameter under several names
    for path, module in list(model.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in filled:
                value = _broadcast(files, names[_join(path, name)], parameter, device)
                filled[id(parameter)] = nn.Parameter(value.to(dtype), requires_grad=parameter.requires_grad)
            setattr(module, name, filled[id(parameter)])
        _load_buffers(module, path, files, device)
        if quantization is not None and should_quantize(module) and module is not output_head:
            module = quantized_linear(module, quantization, compute_dtype=dtype)
            _replace(model, path, module)
        if deepspeed_config is not None:
            _partition(module, deepspeed_config)
        if shards is not None:
            shards.cut_if_whole(model, path)
    model.eval()
    model.is_loaded_in_4bit = quantization is not None
    if quantization is not None:
        model.config.quantization_config = _quantization_record(quantization, dtype)
        model.is_quantized = True
        model.quantization_method = "bitsandbytes"
    return model


def _partition(module: nn.Module, deepspeed_config: dict[str, Any]) -> None:
    import deepspeed

    own = nn.Module()  # only this module's own parameters: its children come in their turn
    for name, parameter in module.named_parameters(recurse=False):
        own.register_parameter(name, parameter)
    if any(True for _ in own.parameters()):
        deepspeed.zero.Init(module=own, config_dict_or_path=deepspeed_config)


def _broadcast(files: Tensors, name: str, parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    """The tensor on every rank; one rank per run reads the disk."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return files.read(name).to(device)
    if dist.get_rank() == 0:
        value = files.read(name).to(device=device, dtype=parameter.dtype).contiguous()
    else:
        value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    dist.broadcast(value, src=0)
    return value


def _load_buffers(module: nn.Module, path: str, files: Tensors, device: torch.device) -> None:
    known = files.names()
    for name, buffer in list(module.named_buffers(recurse=False)):
        stored = _join(path, name)
        value = files.read(stored).to(buffer.dtype) if stored in known else buffer
        module._buffers[name] = value.to(device)


def _names_in_checkpoint(model: Any, files: Tensors, base_model: str) -> dict[str, str]:
    """For every parameter its name in the files, which may lack or add the prefix of the inner model, or be older."""
    stored = {name: name for name in files.names()}
    stored = _renamed(model, stored) | stored
    prefix = f"{model.base_model_prefix}."
    tied = set(require(model, "all_tied_weights_keys", "transformers"))
    names: dict[str, str] = {}
    seen: set[int] = set()
    missing: list[str] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for candidate in (name, name.removeprefix(prefix), prefix + name):
            if candidate in stored:
                names[name] = stored[candidate]
                break
        else:
            if name not in tied and id(parameter) not in seen:
                missing.append(name)
        seen.add(id(parameter))
    if missing:
        raise UserError(
            f"base_model={base_model}: {len(missing)} weights are stored in another form (first: {missing[0]}), "
            "which can only be loaded whole and unquantised; use zero.stage 0 to 2 with adapter: lora"
        )
    by_id = {
        id(parameter): names[name]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name in names
    }
    return {name: by_id[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}


def _renamed(model: Any, names: Iterable[str]) -> dict[str, str]:
    """The stored name behind each that transformers gives to one, where it does no more than rename it."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    others = [each for each in transforms if not isinstance(each, WeightRenaming)]
    renamed = {}
    for name in names:
        target, conversion = rename_source_key(name, renamings, others)
        if conversion is None:
            renamed[target] = name
    return renamed


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
