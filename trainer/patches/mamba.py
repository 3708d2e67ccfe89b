"""Make Mamba-2 layers call their adapted projections, and report weights that have no adapter."""

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
from trainer.parallel.engine.linear_layers import find_base_model, get_logical_shape, is_linear
from trainer.patches.replace import replace

# Name, in transformers' modeling files, of mamba-ssm's training kernel for an entire Mamba-2 layer.
LAYER_KERNEL = "mamba2_split_conv1d_scan_combined"
SCAN, CONVOLUTION = ("mamba_ssm", "selective_scan_cuda"), ("causal_conv1d", "causal_conv1d_cuda")
"""Pairs (package, compiled library); transformers uses a package's kernels if the package can be imported."""


def check_quantizable(model: Any) -> None:
    """Raise UserError if qlora can quantize no layer except the output head. The model may be on the meta device."""
    head = model.get_output_embeddings()
    if not any(is_linear(module) for module in model.modules() if module is not head):
        raise UserError(f"adapter=qlora: {type(model).__name__} has no linear layer to quantize; use adapter: lora")


def describe_unadapted_weights(model: nn.Module) -> list[str]:
    """Return a console line listing unadapted weight matrices outside linear layers, such as experts; [] if none."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper
    from transformers.pytorch_utils import Conv1D

    # Conv1D is GPT-2's linear layer, with a transposed weight.
    linear = (nn.Linear, nn.Embedding, LoraLayer, Conv1D)
    towers = tuple(f"{path}." for path in find_non_text_modules(find_base_model(model)))
    wrappers: list[Any] = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    adapted = {id(wrapper.get_param()) for wrapper in wrappers}
    counts: Counter[tuple[str, torch.Size]] = Counter()
    for path, module in find_base_model(model).named_modules():
        if isinstance(module, linear) or f"{path}.".startswith(towers):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            shape = torch.Size(get_logical_shape(parameter))
            if len(shape) > 1 and not parameter.requires_grad and id(parameter) not in adapted:
                last = [part for part in path.split(".") if part != "base_layer"][-1]
                counts[last if name == "weight" else f"{last}.{name}", shape] += 1
    if not counts:
        return []
    weights = [f"{name} ({count} of {' x '.join(map(str, shape))})" for (name, shape), count in counts.items()]
    elements = sum(count * shape.numel() for (_, shape), count in counts.items())
    fraction = elements / count_parameters(model)[1]
    return [f"without adapter (not linear layers): {', '.join(weights)}; {fraction:.1%} of all parameters"]


def is_mamba_2(module: nn.Module) -> bool:
    """Return whether this is transformers' Mamba-2 mixer (Mamba-1 has no chunk size, other mixers no SSM state)."""
    parts = ("in_proj", "out_proj", "ssm_state_size", "chunk_size")
    return type(module).__module__.startswith("transformers.") and all(hasattr(module, part) for part in parts)


@replaces("`mamba2_split_conv1d_scan_combined` of modeling files")
def install_mamba_projections(model: Any) -> list[str]:
    """Make Mamba-2 layers call their out_proj if it has an adapter or 4-bit weights. Return lines for the console.

    mamba-ssm's kernel for an entire layer reads out_proj's weight without calling the layer, so an adapter on it would
    receive no gradient. If that kernel returns None, transformers uses mamba-ssm's separate kernels for the convolution
    and the scan.
    """
    mixers = [module for module in model.modules() if is_mamba_2(module)]
    adapted = [module for module in mixers if type(module.out_proj) is not nn.Linear]
    for module in mixers:
        modeling_file = sys.modules[type(module).__module__]
        kernel = require(modeling_file, LAYER_KERNEL, "transformers")
        if module in adapted and kernel is not _return_none:
            replace(modeling_file, LAYER_KERNEL, _return_none)
    if not mixers:
        return []
    if reason := explain_unused_kernels(*SCAN):
        return [f"mamba: {len(mixers)} layers run in plain torch; {reason}"]
    lines = [f"mamba: out_proj of {len(adapted)} layers runs outside mamba-ssm's kernel, which would skip its adapter"]
    if reason := explain_unused_kernels(*CONVOLUTION):
        lines.append(f"mamba: convolutions run in plain torch; {reason}")
    return lines


def has_scan_kernels() -> bool:
    """Return whether mamba-ssm is usable. Its Triton scan uses less memory than a scan in plain torch."""
    return not _describe_load_problem(*SCAN)


def explain_unused_kernels(package: str, library: str) -> str:
    """Return why transformers, which has already tried to import the kernels, does not use them; "" if it does."""
    return _describe_load_problem(package, library) or _describe_import_problem(package, package)


def _describe_load_problem(package: str, library: str) -> str:
    """Return why the kernels cannot be loaded, or "". Imports only `library`, because importing `package` is slow."""
    if any(importlib.util.find_spec(name) is None for name in (package, library)):
        return "install the `mamba` extra for faster kernels that use less memory"
    return _describe_import_problem(package, library)


def _describe_import_problem(package: str, name: str) -> str:
    try:
        importlib.import_module(name)
    except Exception as error:  # transformers also ignores any error from the package
        return f"{package} is installed but cannot be imported ({error}): build it against this torch, or uninstall it"
    return ""


def _return_none(*args: Any, **kwargs: Any) -> None:
    """Return None, as transformers' placeholder for a missing kernel does."""
