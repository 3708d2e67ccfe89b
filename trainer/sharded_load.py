"""Weights read from safetensors module by module: quantised to 4 bits, partitioned under ZeRO-3, never whole.

transformers skips `zero.Init` for quantised models (every rank would hold the whole 4-bit model) and, for others, reads
the whole checkpoint into the memory of rank 0. Here rank 0 reads one module's tensors, all ranks receive them, each
quantises alike (the same input gives the same bits), and DeepSpeed keeps this rank's share before the next is read.
Peak memory of a rank: its share of the model and one module in full precision.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.config import ModelSection, QuantizationSection, UserError
from trainer.config.known_versions import require
from trainer.layers.shards import LayerShards
from trainer.quantize import quantized_linear, should_quantize
from trainer.random_model import RandomTensors
from trainer.shapes import is_random


class SafetensorsFiles:
    """All tensors of a model's safetensors files by name, each read when asked for."""

    def __init__(self, base_model: str, section: ModelSection) -> None:
        self._base_model = base_model
        self._folder = _checkpoint_folder(base_model, section)
        self._file_of: dict[str, Path] = {}
        index = self._folder / "model.safetensors.index.json"
        if index.exists():
            for name, file in json.loads(index.read_text())["weight_map"].items():
                self._file_of[name] = self._folder / file
        else:
            for file in sorted(self._folder.glob("*.safetensors")):
                self._file_of |= dict.fromkeys(self._shapes_in(file), file)
        if not self._file_of:
            raise UserError(
                f"base_model={base_model}: no .safetensors file; only safetensors are loaded, convert it first"
            )

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file_of)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors, from the headers of the files. Raises UserError if a file cannot be read."""
        shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(set(self._file_of.values())):
            shapes |= self._shapes_in(file)
        return shapes

    def _shapes_in(self, file: Path) -> dict[str, tuple[int, ...]]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(file), framework="pt") as handle:
                return {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"base_model={self._base_model}: {file.name} cannot be read ({error}); download or copy it again"
            ) from error

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU."""
        from safetensors import safe_open

        with safe_open(str(self._file_of[name]), framework="pt") as handle:
            return torch.as_tensor(handle.get_tensor(name))


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
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=section.trust_remote_code
        )
    model.tie_weights()
    files: Tensors
    files = RandomTensors(base_model, model, device) if is_random(base_model) else SafetensorsFiles(base_model, section)
    names = _names_in_checkpoint(model, files, base_model)
    _check_shapes(model, files, names, base_model, device)
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


def _check_shapes(
    model: nn.Module, files: Tensors, names: dict[str, str], base_model: str, device: torch.device
) -> None:
    """Raises UserError on every rank unless all stored tensors have their parameters' shapes; rank 0 reads headers."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    verdict: list[str | None] = [None]
    if not several or dist.get_rank() == 0:
        try:
            verdict[0] = _wrong_shapes(model, files.shapes(), names, base_model)
        except UserError as error:
            verdict[0] = str(error)
    if several:
        dist.broadcast_object_list(verdict, src=0, device=device)
    if verdict[0] is not None:
        raise UserError(verdict[0])


def _wrong_shapes(
    model: nn.Module, stored: dict[str, tuple[int, ...]], names: dict[str, str], base_model: str
) -> str | None:
    wrong, parameters = [], dict(model.named_parameters())
    for name, parameter in parameters.items():
        shape = stored.get(names[name])
        if shape != tuple(parameter.shape):
            found = "is in none of the files" if shape is None else f"has shape {shape}"
            wrong.append(f"{names[name]} {found}, config.json says {tuple(parameter.shape)}")
    if not wrong:
        return None
    return (
        f"base_model={base_model}: {len(wrong)} of {len(parameters)} weights do not fit config.json "
        f"(first: {wrong[0]}); take both from the same model"
    )


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


def _checkpoint_folder(base_model: str, section: ModelSection) -> Path:
    if Path(base_model).is_dir():
        return Path(base_model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(base_model, revision=section.revision, allow_patterns=["*.safetensors", "*.json"]))


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
