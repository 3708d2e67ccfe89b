"""Hybrid and MoE models: adapters that a fused kernel would bypass, and weights without an adapter."""

import importlib
import importlib.util
import sys
from collections import Counter
from typing import Any

import torch
from torch import nn

from trainer.config import UserError
from trainer.contract.known_versions import replaces, require
from trainer.model.adapter import count_parameters
from trainer.model.targets import find_non_text_modules
from trainer.parallel.engine.linear_layers import is_linear, model_shape
from trainer.patches.replace import replace

# Name, in transformers' modeling files, of mamba-ssm's kernel for a whole Mamba-2 layer in training.
WHOLE_LAYER_KERNEL = "mamba2_split_conv1d_scan_combined"
SCAN, CONVOLUTION = ("mamba_ssm", "selective_scan_cuda"), ("causal_conv1d", "causal_conv1d_cuda")
"""A package with a kernel that transformers uses if the import succeeds, and the compiled library of the package."""


def check_packable(model: Any) -> None:
    """Raise UserError if `adapter: qlora` finds nothing to quantise; the model may be without weights."""
    head = model.get_output_embeddings()
    if not any(is_linear(module) for module in model.modules() if module is not head):
        raise UserError(f"adapter=qlora: {type(model).__name__} has no linear layer to quantise; use adapter: lora")


def unadapted_lines(model: nn.Module) -> list[str]:
    """Return a line on the weight matrices outside linear layers that have no adapter, such as fused experts.

    A model with only linear layers, embeddings and norms has none.
    """
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper
    from transformers.pytorch_utils import Conv1D

    # Conv1D is GPT-2's linear layer, with its weight transposed.
    linear = (nn.Linear, nn.Embedding, LoraLayer, Conv1D)
    towers = tuple(f"{path}." for path in find_non_text_modules(_find_base(model)))
    wrappers: list[Any] = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    adapted = {id(wrapper.get_param()) for wrapper in wrappers}
    counts: Counter[tuple[str, torch.Size]] = Counter()
    for path, module in _find_base(model).named_modules():
        if isinstance(module, linear) or f"{path}.".startswith(towers):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            shape = torch.Size(model_shape(parameter))
            if len(shape) > 1 and not parameter.requires_grad and id(parameter) not in adapted:
                counts[_last_name(path) if name == "weight" else f"{_last_name(path)}.{name}", shape] += 1
    if not counts:
        return []
    words = [f"{name} ({count} of {' x '.join(map(str, shape))})" for (name, shape), count in counts.items()]
    elements = sum(count * shape.numel() for (_, shape), count in counts.items())
    fraction = elements / count_parameters(model)[1]
    return [f"without adapter, not linear layers: {', '.join(words)}: {fraction:.1%} of all parameters"]


def _find_base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _last_name(path: str) -> str:
    """Return `experts` for mlp.experts.base_layer.base_layer, in which PEFT nests several adapters of one module."""
    names = [name for name in path.split(".") if name != "base_layer"]
    return names[-1]


def is_mamba_2(module: nn.Module) -> bool:
    """Return whether this is one of transformers' Mamba-2 mixers: Mamba-1 has no chunks, other mixers no state."""
    parts = ("in_proj", "out_proj", "ssm_state_size", "chunk_size")
    return type(module).__module__.startswith("transformers.") and all(hasattr(module, part) for part in parts)


@replaces("`mamba2_split_conv1d_scan_combined` of modeling files")
def call_projections_of_mamba(model: Any) -> list[str]:
    """Make Mamba-2 layers call their out_proj if it has an adapter or 4-bit weights; return lines for the console.

    mamba-ssm's kernel for a whole layer reads out_proj's weight without calling the layer, so an adapter on it would
    get no gradient. If that kernel returns None, transformers uses mamba-ssm's separate kernels for the convolution and
    the scan.
    """
    mixers = [module for module in model.modules() if is_mamba_2(module)]
    for module in mixers:
        require(_modeling_file(module), WHOLE_LAYER_KERNEL, "transformers")
    changed = [module for module in mixers if type(module.out_proj) is not nn.Linear]
    for module in changed:
        if getattr(_modeling_file(module), WHOLE_LAYER_KERNEL) is not _no_kernel:
            replace(_modeling_file(module), WHOLE_LAYER_KERNEL, _no_kernel)
    if not mixers:
        return []
    if why_not := why_not_used(*SCAN):
        return [f"mamba: {len(mixers)} layers in plain torch; {why_not}"]
    lines = [f"mamba: out_proj of {len(changed)} layers outside mamba-ssm's kernel, which would bypass its adapter"]
    if why_not := why_not_used(*CONVOLUTION):
        lines.append(f"mamba: convolutions in plain torch; {why_not}")
    return lines


def has_scan_kernels() -> bool:
    """Return whether mamba-ssm is installed and compiled: its Triton scan keeps less memory than plain torch's."""
    return not _why_not_loaded(*SCAN)


def why_not_used(package: str, library: str) -> str:
    """Return why transformers, which has tried the import by now, does not use the kernels; empty if it does."""
    return _why_not_loaded(package, library) or _why_not_imported(package, package)


def _why_not_loaded(package: str, library: str) -> str:
    """Return why the kernels are unavailable, as far as known without the slow import of the package; or empty."""
    if any(importlib.util.find_spec(name) is None for name in (package, library)):
        return "the extra `mamba` has kernels that are faster and keep less memory"
    return _why_not_imported(package, library)


def _why_not_imported(package: str, name: str) -> str:
    try:
        importlib.import_module(name)
    except Exception as error:  # transformers also ignores any error of the package
        return f"{package} is installed but cannot be imported ({error}): build it against this torch, or uninstall it"
    return ""


def _modeling_file(module: nn.Module) -> Any:
    return sys.modules[type(module).__module__]


def _no_kernel(*args: Any, **kwargs: Any) -> None:
    """Return None, which transformers takes for a missing kernel."""
