"""Hybrids and mixtures of experts: adapters that a fused kernel would pass by, and weights that get no adapter."""

import importlib
import importlib.util
import sys
from collections import Counter
from typing import Any

import torch
from torch import nn

from trainer.config import UserError
from trainer.contract.known_versions import require
from trainer.contract.replacements import replaces
from trainer.model.adapter import count_parameters
from trainer.model.targets import beyond_text
from trainer.parallel.engine.linear_layers import is_linear, model_shape, packed_experts_layout
from trainer.patches.replace import replace

# transformers' name, in its modeling files, of mamba-ssm's kernel for the whole of a Mamba-2 layer in training.
WHOLE_LAYER_KERNEL = "mamba2_split_conv1d_scan_combined"
SCAN, CONVOLUTION = ("mamba_ssm", "selective_scan_cuda"), ("causal_conv1d", "causal_conv1d_cuda")
"""A package that transformers takes a kernel of where it can be imported, and what building that leaves beside it."""


def check_packable(model: Any) -> None:
    """Raise UserError where `adapter: qlora` would find nothing to quantise; the model may be without weights."""
    head = model.get_output_embeddings()
    if not any(is_linear(module) for module in model.modules() if module is not head):
        raise UserError(
            f"adapter=qlora: {type(model).__name__} has no linear layer that could be quantised; use adapter: lora"
        )


def unquantized_lines(model: nn.Module) -> list[str]:
    """A line on the adapted layers of a quantised run whose base is not quantised; or none."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    from trainer.model.eight_bit import FrozenLinear8bit
    from trainer.model.four_bit import FrozenLinear4bit  # brings bitsandbytes

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    kinds = [type(layer.base_layer) for layer in layers if not isinstance(layer, ParamWrapper)]
    counts = Counter(kind.__name__ for kind in kinds if kind not in (FrozenLinear4bit, FrozenLinear8bit, nn.Embedding))
    if not counts:
        return []
    return ["adapted, but not quantised: " + ", ".join(f"{name} ({count})" for name, count in counts.items())]


def unadapted_lines(model: nn.Module, *, quantized: bool) -> list[str]:
    """Lines on the weight matrices that are no linear layers and have no adapter, such as fused experts; or none.

    A model of linear layers, embeddings and norms alone has no such line. Packed experts have one of their own.
    """
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper
    from transformers.pytorch_utils import Conv1D

    # PEFT's adapter on a parameter that is no linear layer's weight.
    # Conv1D is GPT-2's linear layer, with its weight the other way round.
    linear = (nn.Linear, nn.Embedding, LoraLayer, Conv1D)
    towers = tuple(f"{path}." for path in beyond_text(_base_of(model)))
    wrappers: list[Any] = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    adapted = {id(wrapper.get_param()) for wrapper in wrappers}
    found: dict[str, Counter[tuple[str, tuple[int, ...]]]] = {}
    for path, module in _base_of(model).named_modules():
        if isinstance(module, linear) or f"{path}.".startswith(towers):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            shape = tuple(model_shape(parameter))
            if len(shape) > 1 and not parameter.requires_grad and id(parameter) not in adapted:
                where = _last_name(path) if name == "weight" else f"{_last_name(path)}.{name}"
                packing = packed_experts_layout(parameter)
                bits = ", being no linear layers, and not in 4 bits" if quantized else ", being no linear layers"
                found.setdefault(f", in {packing.kind.upper()}" if packing else bits, Counter())[where, shape] += 1
    lines = []
    for kind, counts in found.items():
        words = [f"{name} ({count} of {' x '.join(map(str, shape))})" for (name, shape), count in counts.items()]
        elements = sum(count * torch.Size(shape).numel() for (_, shape), count in counts.items())
        fraction = elements / count_parameters(model)[1]
        lines.append(f"without adapter{kind}: {', '.join(words)}: {fraction:.1%} of all parameters")
    return lines


def _base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _last_name(path: str) -> str:
    """`experts` of mlp.experts.base_layer.base_layer, PEFT's way of nesting several adapters of one module."""
    names = [name for name in path.split(".") if name != "base_layer"]
    return names[-1]


def _is_mamba_2(module: nn.Module) -> bool:
    """By what all of transformers' have: of Mamba-1 there are no chunks, of other mixers no state."""
    parts = ("in_proj", "out_proj", "ssm_state_size", "chunk_size")
    return type(module).__module__.startswith("transformers.") and all(hasattr(module, part) for part in parts)


@replaces(
    "`mamba2_split_conv1d_scan_combined` of modeling files",
    library="transformers",
    read_in="5.23.0",
    why="the fused kernel reads the weight of out_proj without calling the layer, so its adapter would get no gradient",
    active="hybrid models with out_proj adapted or in 4 bits",
    test="tests/unit/test_architectures.py",
    upstream="https://github.com/huggingface/peft/issues/2274",
)
def call_projections_of_mamba(model: Any) -> list[str]:
    """Make Mamba-2 layers call their out_proj if it has an adapter or 4-bit weights; lines on how they compute.

    mamba-ssm's kernel for a whole layer takes out_proj's weight and never calls the layer: an adapter on it would get
    no gradient. transformers asks that kernel first and goes step by step, still with mamba-ssm's kernels for the
    convolution and the scan, where it answers None.
    """
    mixers = [module for module in model.modules() if _is_mamba_2(module)]
    for module in mixers:
        require(_file_of(module), WHOLE_LAYER_KERNEL, "transformers")
    changed = [module for module in mixers if type(module.out_proj) is not nn.Linear]
    for module in changed:
        if getattr(_file_of(module), WHOLE_LAYER_KERNEL) is not _no_kernel:
            replace(_file_of(module), WHOLE_LAYER_KERNEL, _no_kernel)
    if not mixers:
        return []
    if why_not := _why_not_used(*SCAN):
        return [f"mamba: {len(mixers)} layers in plain torch; {why_not}"]
    lines = [f"mamba: out_proj of {len(changed)} layers apart from mamba-ssm's kernel, which would pass its adapter by"]
    if why_not := _why_not_used(*CONVOLUTION):
        lines.append(f"mamba: convolutions in plain torch; {why_not}")
    return lines


def has_scan_kernels() -> bool:
    """Whether mamba-ssm is there, with what it compiles: its scan, in Triton, keeps less than that of plain torch."""
    return not _why_not_loaded(*SCAN)


def _why_not_used(package: str, library: str) -> str:
    """Why transformers does not take its kernels, which has tried to import it by now; empty where it does."""
    return _why_not_loaded(package, library) or _why_not_imported(package, package)


def _why_not_loaded(package: str, library: str) -> str:
    """Why not, as far as that is known without the package itself, whose import takes seconds."""
    if any(importlib.util.find_spec(name) is None for name in (package, library)):
        return "the extra `mamba` has kernels that are faster and keep less"
    return _why_not_imported(package, library)


def _why_not_imported(package: str, name: str) -> str:
    try:
        importlib.import_module(name)
    except Exception as error:  # of the package's own code: transformers passes over any of them
        return f"{package} is installed and cannot be imported ({error}): build it against this torch, or uninstall it"
    return ""


def _file_of(module: nn.Module) -> Any:
    return sys.modules[type(module).__module__]


def _no_kernel(*args: Any, **kwargs: Any) -> None:
    """What transformers takes for `there is no such kernel here`."""
