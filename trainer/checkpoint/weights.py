"""The trained weights as files: a PEFT adapter or a whole model, gathered, written, read back and compared."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from trainer.engine.flat_adapter import trained_parameters
from trainer.engine.partitioned import is_partitioned
from trainer.model.expert_factor import in_peft_form


def save_adapter(
    model: Any, folder: Path, *, is_main: bool, must_have_moved: bool, initial: Path | None = None
) -> None:
    """Write the adapter in PEFT's format, read it back, and compare. Every rank must call it; rank 0 writes."""
    trained = gathered(model)
    if is_main:
        write_adapter(model, trained, folder, must_have_moved=must_have_moved, initial=initial)


def write_adapter(
    model: Any, trained: dict[str, torch.Tensor], folder: Path, *, must_have_moved: bool, initial: Path | None = None
) -> None:
    """Write gathered factors in PEFT's format, read them back, and compare; of the model only settings are read.

    With `initial` (the folder of the adapter as it began, for PiSSA and OLoRA, which change the base weights) the
    difference to it is written, which fits the unchanged base model.
    Raises RuntimeError if what was read back is empty, not finite, differs from memory, or never moved from B = 0
    though it `must_have_moved`.
    """
    trained = in_peft_form(model, trained)
    factors_b = [value for name, value in trained.items() if "lora_B" in name]
    if must_have_moved and factors_b and not any(value.any() for value in factors_b):
        raise RuntimeError(f"{folder}: every lora_B is still zero after training; nothing was learned")
    model.save_pretrained(folder, state_dict=trained)
    (folder / "README.md").unlink()  # PEFT's blank form
    _compare_with_memory(model, trained, folder)
    if initial is not None:
        _rewrite_as_difference(folder, initial)
    _check_read_back(folder / "adapter_model.safetensors")


def _rewrite_as_difference(folder: Path, initial: Path) -> None:
    """Turn an adapter whose start was taken out of the base into one for the unchanged base.

    W + dW = (W - s B0 A0) + s B A, so dW = s [B, -B0] [A; A0]: rank 2r with the same scale (PEFT's own conversion loads
    a second adapter into the model, which must not happen in the middle of training).
    """
    file = folder / "adapter_model.safetensors"
    now, start = load_file(file), load_file(initial / "adapter_model.safetensors")
    for name in now:
        if "lora_A" in name:
            now[name] = torch.cat([now[name], start[name]], dim=0)
        elif "lora_B" in name:
            now[name] = torch.cat([now[name], -start[name]], dim=1)
    save_file(now, file, metadata={"format": "pt"})
    config = json.loads((folder / "adapter_config.json").read_text())
    growth = math.sqrt(2) if config["use_rslora"] else 2
    config |= {"r": 2 * config["r"], "lora_alpha": growth * config["lora_alpha"], "init_lora_weights": True}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True))


def save_full_model(model: Any, folder: Path, *, is_main: bool) -> None:
    """Write the whole model as safetensors (adapter: none). Every rank must call it; rank 0 writes."""
    weights = gathered(model, only_trained=False)
    if is_main:
        write_full_model(model, weights, folder)


def write_full_model(model: Any, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write gathered weights as safetensors; of the model only settings are read."""
    model.save_pretrained(folder, state_dict=weights)
    for file in folder.glob("*.safetensors"):
        _check_read_back(file)


def gathered(
    model: nn.Module, *, only_trained: bool = True, copy: Callable[[str, torch.Tensor], torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Weights by name, whole, on the CPU of rank 0 (empty elsewhere); one tensor is gathered at a time.

    `copy(name, tensor)` brings one to the CPU. Every rank must call it.
    """
    import deepspeed
    import torch.distributed as dist

    is_main = not dist.is_initialized() or dist.get_rank() == 0
    copy = copy or (lambda _, tensor: tensor.detach().to("cpu", copy=True).contiguous())
    found: dict[str, torch.Tensor] = {}
    for name, parameter in trained_parameters(model) if only_trained else model.named_parameters():
        partitioned = [parameter] if is_partitioned(parameter) else []
        with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
            if is_main:
                found[name] = copy(f"weights/{name}", parameter)
    if is_main and not only_trained:
        kept = model.state_dict().keys()
        found |= {name: copy(f"weights/{name}", buffer) for name, buffer in model.named_buffers() if name in kept}
    return found


def _compare_with_memory(model: Any, trained: dict[str, torch.Tensor], folder: Path) -> None:
    from peft import get_peft_model_state_dict

    expected = get_peft_model_state_dict(model, state_dict=trained)
    stored = load_file(folder / "adapter_model.safetensors")
    missing = [name for name in expected if name not in stored]
    if missing:
        raise RuntimeError(f"{folder}: the saved adapter lacks {len(missing)} tensors, first {missing[0]}")
    for name, value in expected.items():
        if not torch.equal(stored[name], value.to(stored[name].dtype)):
            raise RuntimeError(f"{folder}: {name} read back differs from what is trained")


def _check_read_back(file: Path) -> None:
    stored = load_file(file)
    if not stored or all(value.numel() == 0 for value in stored.values()):
        raise RuntimeError(f"{file}: holds no weights")
    for name, value in stored.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise RuntimeError(f"{file}: {name} is not finite; the last good weights are in the newest checkpoint")
