"""Which modules are linear layers and nothing else: those can be held in 4 bits and take the fused operators."""

from functools import cache
from typing import Any

import torch
from torch import nn

from trainer.contract.known_versions import require


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes x W^T + b: nn.Linear, or a subclass of which a small one is seen to do so.

    Falcon's linear layers do; routers of experts, which are subclasses too, give back more than that.
    """
    kind: Any = type(module)
    return kind is nn.Linear or (isinstance(module, nn.Linear) and _acts_linear(kind))


def packed_state(parameter: nn.Parameter) -> Any | None:
    """How bitsandbytes packed a 4-bit weight; None of any other parameter."""
    is_packed = type(parameter).__name__ == "Params4bit"  # the name by which PEFT knows it as well
    return require(parameter, "quant_state", "bitsandbytes") if is_packed else None


# What the subclasses of transformers, PEFT, bitsandbytes and DeepSpeed answer where they want other arguments, packed
# weights, another device or kernels that are not installed. Anything else is a fault, and is shown.
REFUSALS = (TypeError, ValueError, AttributeError, IndexError, RuntimeError, AssertionError, ImportError)


@cache
def _acts_linear(kind: Any) -> bool:
    x = torch.linspace(-1.0, 1.0, 8, device="cpu").view(2, 4)
    try:
        with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
            # Values of our own: this may be called where models are made without weights.
            small = kind(4, 3).to_empty(device="cpu")
            for parameter in small.parameters():
                parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()).view_as(parameter))
            found = small(x)
            expected = nn.functional.linear(x, small.weight, small.bias)
    except REFUSALS:
        return False
    return isinstance(found, torch.Tensor) and found.shape == expected.shape and torch.allclose(found, expected)
