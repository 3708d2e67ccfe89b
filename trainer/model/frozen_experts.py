"""The forward of packed experts without an adapter: the model's own code on dequantised weights.

No weights are kept for the backward pass, which dequantises them again and recomputes the experts. All layers share
one buffer per kind of tensor, so only the layer being computed has 16-bit weights.
"""

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.contract.replacements import replaces
from trainer.model.packed_experts import PackedExperts


@replaces("the forward of quantised experts")
def compute_dequantized(module: nn.Module) -> None:
    """Replace the forward of a module with packed experts by one on dequantised weights."""
    module.forward = partial(forward_frozen, module, module.forward)


def packed_tensors(module: nn.Module) -> dict[str, PackedExperts]:
    """Return a module's own packed parameters by name."""
    return {name: each for name, each in module._parameters.items() if isinstance(each, PackedExperts)}


def forward_frozen(module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a module's `forward` with frozen weights; the backward pass recomputes it."""
    return checkpoint(_compute, module, forward, args, kwargs, use_reentrant=False, preserve_rng_state=False)


def _compute(module: nn.Module, forward: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    own = vars(module)
    packed = packed_tensors(module)
    own.update({name: _BUFFERS.fill(name, parameter) for name, parameter in packed.items()})
    try:
        return forward(*args, **kwargs)
    finally:
        for name in packed:
            del own[name]


class _Buffers:
    """One buffer per name, type and device, and the tensor that each currently holds."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self._held: dict[tuple[Any, ...], weakref.ref[PackedExperts]] = {}

    def fill(self, name: str, parameter: PackedExperts) -> Tensor:
        layout = parameter.packing
        key = (name, layout.dtype, parameter.device)
        buffer = self._buffers.get(key)
        size = layout.experts * layout.rows * layout.cols
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = torch.empty(size, dtype=layout.dtype, device=parameter.device)
            self._held.pop(key, None)
        values = buffer[:size].view(layout.shape)
        held = self._held.get(key)
        if held is None or held() is not parameter:
            self._held.pop(key, None)
            parameter.dequantized(values)
            self._held[key] = weakref.ref(parameter)
        return values.detach()


_BUFFERS = _Buffers()
