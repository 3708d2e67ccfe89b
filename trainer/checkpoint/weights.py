"""Gather the trained weights, write them as a PEFT adapter or full model, and verify the files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from trainer.checkpoint.adapter_files import SETTINGS, WEIGHTS, AdapterFormat, subtract_initial_adapter
from trainer.checkpoint.checkpoint_files import compute_checksum
from trainer.checkpoint.tensor_writer import write_tensors
from trainer.contract.whole_files import apply_umask
from trainer.parallel.engine.flat_adapter import list_trained_parameters
from trainer.parallel.engine.partitioned import is_partitioned


def save_initial_adapter(model: Any, folder: Path, *, is_main: bool) -> None:
    """Write the initial adapter, which `write_adapter` subtracts from the trained one; a collective call."""
    config = model.peft_config["default"]
    method, config.init_lora_weights = config.init_lora_weights, True
    trained = gather_weights(model)
    if is_main:
        write_adapter(AdapterFormat.from_model(model, trained), trained, folder, require_nonzero_b=False)
    config.init_lora_weights = method


def write_adapter(
    adapter_format: AdapterFormat,
    trained: Mapping[str, torch.Tensor],
    folder: Path,
    *,
    require_nonzero_b: bool,
    initial: Path | None = None,
) -> None:
    """Write gathered factors in PEFT's format and verify the file.

    PiSSA and OLoRA change the base weights. For them, `initial` is the folder of the initial adapter, and the file
    contains the difference from that adapter, which applies to the unchanged base model.
    Raises RuntimeError if weights are missing or not finite, if the file differs from memory, or if `require_nonzero_b`
    is set and B is still zero; NotReloadableError if PEFT could not load the file completely.
    """
    stored = adapter_format.build_tensors(trained)
    factors_b = [value for name, value in stored.items() if "lora_B" in name]
    if require_nonzero_b and factors_b and not any(value.any() for value in factors_b):
        raise RuntimeError(f"{folder}: every lora_B is still zero after training; raise training.learning_rate")
    if initial is not None:
        adapter_format = adapter_format.convert_for_unchanged_base()
        stored = subtract_initial_adapter(stored, load_file(initial / WEIGHTS))
    _check_finite(stored, folder)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / WEIGHTS
    if write_tensors(file, stored, {"format": "pt"}) != compute_checksum(file):
        raise RuntimeError(f"{file}: differs from the trained weights when read back; check the disk")
    (folder / SETTINGS).write_text(adapter_format.settings, encoding="utf-8")
    adapter_format.check_loadable(folder)


def write_full_model(model: Any, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write gathered weights and the model's `config.json`. Raises RuntimeError if `weights` is empty or not finite."""
    _check_finite(weights, folder)
    model.save_pretrained(folder, state_dict=weights)
    apply_umask(folder)


def gather_weights(
    model: nn.Module, *, only_trained: bool = True, copy: Callable[[str, torch.Tensor], torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Gather full weights by name on rank 0's CPU, one tensor at a time; other ranks return an empty dict.

    `copy(name, tensor)` copies a tensor to the CPU. A collective call.
    """
    import deepspeed
    import torch.distributed as dist

    is_main = not dist.is_initialized() or dist.get_rank() == 0
    copy = copy or (lambda _, tensor: tensor.detach().to("cpu", copy=True).contiguous())
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in list_trained_parameters(model) if only_trained else model.named_parameters():
        partitioned = [parameter] if is_partitioned(parameter) else []
        with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
            if is_main:
                weights[name] = copy(f"weights/{name}", parameter)
    if is_main and not only_trained:
        persistent = model.state_dict().keys()
        weights |= {
            name: copy(f"weights/{name}", buffer) for name, buffer in model.named_buffers() if name in persistent
        }
    return weights


def _check_finite(weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    if not weights:
        raise RuntimeError(f"{folder}: no weights to write")
    for name, value in weights.items():
        if value.element_size() > 1 and not value.isfinite().all():  # 8-bit types have no infinity
            raise RuntimeError(f"{folder}: {name} has NaN or inf; the last good weights are in the newest checkpoint")
