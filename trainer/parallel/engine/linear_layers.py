"""Find the base model in PEFT's wrapper, its plain linear layers and experts, and the storage format of weights."""

from functools import cache
from typing import Any

import torch
from torch import nn

from trainer.contract.known_versions import require
from trainer.parallel.engine.partitioned import get_full_shape


def find_base_model(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is an nn.Linear, or a subclass that also computes x W^T + b.

    Subclasses are tested on a small instance. Falcon's linear layers pass. MoE routers fail, because they
    return additional values.
    """
    kind: Any = type(module)
    return kind is nn.Linear or (isinstance(module, nn.Linear) and _computes_linear(kind))


def find_expert_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's own parameters with one matrix per expert, by name; they may be packed or partitioned."""
    if "expert" not in type(module).__name__.lower():
        return {}
    return {name: w for name, w in module.named_parameters(recurse=False) if len(get_logical_shape(w)) == 3}


def is_transposed(experts: nn.Module) -> bool:
    """Return whether experts compute x W instead of x W^T: gate and up [E, H, 2 I], down [E, I, H]."""
    shapes = {name: get_logical_shape(weight) for name, weight in find_expert_weights(experts).items()}
    if not {"gate_up_proj", "down_proj"} <= shapes.keys():
        return bool(getattr(experts, "is_transposed", False))
    gate_up, down = shapes["gate_up_proj"], shapes["down_proj"]
    return gate_up[2] == 2 * down[1] and gate_up[1] == down[2]


def get_packed_state(parameter: nn.Parameter) -> Any | None:
    is_packed = type(parameter).__name__ == "Params4bit"  # PEFT checks the same name
    return require(parameter, "quant_state", "bitsandbytes") if is_packed else None


def is_quantized(parameter: nn.Parameter) -> bool:
    return get_packed_state(parameter) is not None or not (parameter.is_floating_point() or parameter.is_complex())


def get_packed_experts_layout(parameter: nn.Parameter) -> Any | None:
    """Return the layout of packed experts (trainer/model/packed_experts.py); None for any other parameter."""
    return getattr(parameter, "packing", None)


def get_logical_shape(parameter: nn.Parameter) -> torch.Size:
    """Return the shape of a parameter before packing and partitioning."""
    packed = get_packed_state(parameter) or get_packed_experts_layout(parameter)
    return get_full_shape(parameter) if packed is None else torch.Size(packed.shape)


# Errors from subclasses in transformers, PEFT, bitsandbytes and DeepSpeed that need other arguments, packed weights,
# another device or kernels that are not installed. Any other error is a bug and is not caught.
CONSTRUCTION_ERRORS = (TypeError, ValueError, AttributeError, IndexError, RuntimeError, AssertionError, ImportError)


@cache
def _computes_linear(kind: Any) -> bool:
    x = torch.linspace(-1.0, 1.0, 8, device="cpu").view(2, 4)
    try:
        with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
            # Set the values explicitly, because modules may currently be created without initial weights.
            small = kind(4, 3).to_empty(device="cpu")
            for parameter in small.parameters():
                parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()).view_as(parameter))
            actual = small(x)
            expected = nn.functional.linear(x, small.weight, small.bias)
    except CONSTRUCTION_ERRORS:
        return False
    return isinstance(actual, torch.Tensor) and actual.shape == expected.shape and torch.allclose(actual, expected)
