"""A decoder layer in small: the last linear of the region that is computed again has outputs that nobody asks for."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ops import lora_group

SHAPES = (16, 24), (24, 16)
FORWARD = ["lora_project", "lora_forward"]


class Calls(TorchDispatchMode):
    """The names of our operators in the order of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        if name.startswith("zerolora::lora"):
            self.names.append(name.removeprefix("zerolora::"))
        return function(*args, **(kwargs or {}))


def assert_last_outputs_are_computed_once(device: str, dropout: float) -> None:
    """Gradients to the bit of those without a checkpoint, and one forward fewer than it has linears."""
    torch.manual_seed(0)
    x = torch.randn(12, 16, device=device, requires_grad=True)
    weights = [torch.randn(out, width, device=device) for width, out in SHAPES]
    downs = [torch.randn(4, width, device=device, requires_grad=True) for width, _ in SHAPES]
    ups = [torch.randn(out, 4, device=device, requires_grad=True) for _, out in SHAPES]

    def layer(x: Tensor) -> Tensor:
        y = x
        for weight, down, up in zip(weights, downs, ups, strict=True):
            (y,) = lora_group(torch.tanh(y), [weight], [None], [down], [up], [0.5], dropout)
        return x + y

    def gradients(again: bool) -> tuple[tuple[Tensor, ...], list[str], list[str]]:
        torch.manual_seed(1)
        with Calls() as calls:
            y = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
            count = len(calls.names)
            found = torch.autograd.grad(y.square().sum(), [x, *downs, *ups])
        return found, calls.names[:count], calls.names[count:]

    expected, forward, backward = gradients(again=False)
    found, first, second = gradients(again=True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert forward == first == FORWARD * 2, forward
    assert backward == ["lora_backward"] * 2, backward
    assert second == [*FORWARD, "lora_project", *backward], second
