"""Activations kept by norms, activation functions and experts, observed by running their code on small inputs."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ops.experts import padded_rank
from trainer.memory.widths import Mixer
from trainer.model.expert_forward import detect_activation
from trainer.model.expert_layers import DOWN, expert_names, expert_shape, expert_width, takes_all_tokens
from trainer.patches.norm_mlp_rope import ROTARY

FP32 = 4
_FEW = 5
USUAL = 2.0  # SiLU and GELU keep their input, and the next operation keeps their result
_FAILURES = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


def observe_saved_bytes(
    function: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype = torch.float32
) -> tuple[float, bool] | None:
    """Return the bytes that a function keeps per row of `width`, and whether these include its result.

    Weights, and tensors derived only from weights, are not counted. Returns None if it is not a function of one tensor.
    """
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.dim() and tensor.shape[0] == _FEW:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # kept alive, so that its address is not reused
        return tensor

    x = torch.linspace(-1.0, 1.0, _FEW * width).view(_FEW, width).to(dtype).requires_grad_()
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = function(x)
    except _FAILURES:
        return None
    if not isinstance(y, Tensor) or not y.requires_grad:
        return None
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / _FEW
    return size, y.untyped_storage().data_ptr() in kept


def observe_norm(norm: nn.Module, width: int) -> dict[int, int]:
    """Return the bytes per token that a frozen norm's own code keeps, by bytes of an element (2, 4)."""
    kept = {}
    for dtype in (torch.bfloat16, torch.float32):
        twin = copy.deepcopy(norm).to_empty(device="cpu").to(dtype).requires_grad_(False)
        found = observe_saved_bytes(twin, width, dtype)
        kept[dtype.itemsize] = FP32 * (width + 1) if found is None else int(found[0])
    return kept


def leaves_layout(module: nn.Module, rotated: int, head: int) -> bool:
    """Return whether the model's rotary embedding preserves the memory layout of heads.

    The output of attention has the layout of its queries; if it changed, the output is copied for the next projection.
    """
    rotate = getattr(sys.modules[type(module).__module__], ROTARY, None)
    tokens = torch.zeros(1, 3, 2, head).transpose(1, 2)
    angles = torch.zeros(1, 3, rotated)
    try:
        queries = rotate(tokens, tokens, angles, angles)[0]  # type: ignore[misc]
    except _FAILURES:
        return True
    return bool(queries.transpose(1, 2).is_contiguous())


def observe_activation(module: nn.Module) -> float:
    """Return what the activation function of a feed-forward layer keeps, in units of its input."""
    width = 8
    for child in module.children():
        if not list(child.parameters()) and not isinstance(child, nn.Dropout | nn.Identity):
            found = observe_saved_bytes(child, width)
            if found is not None:
                return found[0] / (FP32 * width) + (not found[1])
    return USUAL


def read_experts(block: nn.Module, module: Any, hidden: int) -> Mixer:
    """Return the experts of a layer as a mixer with the widths of one expert."""
    from peft.tuners.lora.layer import ParamWrapper

    shapes = {name: expert_shape(module, name) for name in expert_names(module)}
    wrappers: list[Any] = [each for each in block.modules() if isinstance(each, ParamWrapper)]
    adapters = [each for each in wrappers if each.get_base_layer() is module]
    inner = expert_width(module)
    projected = sum(shape[1] * shape[2] // hidden for shape in shapes.values()) - inner
    chosen = [k for each in block.modules() if isinstance(k := getattr(each, "top_k", None), int)]
    choices = shapes[DOWN][0] if takes_all_tokens(module) or not chosen else chosen[0]
    found = observe_saved_bytes(module._apply_gate, projected) if hasattr(module, "_apply_gate") else None
    ranks = [rank for each in adapters for rank in each.r.values()]
    return Mixer(
        kind="experts",
        width_in=hidden,
        width_projected=projected,
        width_inner=inner,
        heads=0,
        trained_in=len(adapters) < len(wrappers),
        trained_out=bool(adapters),
        ranks=choices * sum(map(padded_rank, ranks)),
        largest_weight=max(torch.Size(shape).numel() for shape in shapes.values()),
        activated=projected + USUAL * inner if found is None else found[0] / FP32 + (0 if found[1] else inner),
        choices=choices,
        by_operator=bool(adapters) and detect_activation(module) is not None,
        known_gate=detect_activation(module) is not None,
    )
