"""Linear layers held in 8 bits (FP8 e4m3, or int8) with one scale a row, whose products are 8-bit products too.

The values are stored as uint8 (e4m3) or int8: the 16-bit engine converts every parameter of a float type, and with it
the bits. The scales are no parameter and no buffer for the same reason; they stay whole on every rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ops
from ops.eight_bit import STORAGE
from ops.reference import quantize_rows
from trainer.config import UserError
from trainer.engine.linear_layers import experts_in

KINDS = tuple(STORAGE)
FP8_FROM = (8, 9)
"""Compute capability of the first cards with FP8 products."""
ROWS_AT_ONCE = 4096  # of a weight while it is quantised: its copy in 32 bits would be four times the result


class FrozenLinear8bit(nn.Linear):
    """A frozen linear layer (and so a Linear to PEFT): its weight is 8-bit values [O,I], `row_scale` their scales.

    ops/eight_bit.py has the arithmetic, forward and backward.
    """

    def __init__(self, linear: nn.Module, kind: str, compute_dtype: torch.dtype) -> None:
        """Takes the values of `linear`, which loses them."""
        assert isinstance(linear, nn.Linear)
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.kind, self.compute_dtype = kind, compute_dtype
        parts = linear.weight.data.to(compute_dtype).split(ROWS_AT_ONCE)
        values, scales = zip(*(quantize_rows(part, STORAGE[kind]) for part in parts), strict=True)
        self.weight = nn.Parameter(torch.cat(values), requires_grad=False)
        self.row_scale = torch.cat(scales)
        self.bias = linear.bias
        # Others may still hold the old layer for a while; its memory goes now, or the whole model would add up.
        linear.weight.data = linear.weight.data.new_empty(0)

    @property
    def packed(self) -> ops.EightBitWeight:
        """What the operators take."""
        return ops.EightBitWeight(self.weight, self.row_scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y[..., O] in the type of x, computed in the layer's compute dtype."""
        return ops.eight_bit_linear(x.to(self.compute_dtype), self.packed, self.bias).to(x.dtype)

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.row_scale = self.row_scale.to(self.weight.device)
        return self


def check_card(kind: str, device: torch.device) -> None:
    """Raise UserError for fp8 on a card that has no FP8 products; the CPU computes it by its definition."""
    if kind != "fp8" or device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_FROM:
        name, found = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        raise UserError(
            f"quantization.quant_type=fp8: {name} has compute capability {found}, and FP8 needs 8.9 (Ada) or newer; "
            "use quantization.quant_type: int8"
        )


def check_no_experts(kind: str, model: nn.Module) -> None:
    """Raise UserError where a mixture's experts would have to be held in 8 bits; the model may be without weights."""
    if any(experts_in(module) for module in model.modules()):
        raise UserError(
            f"quantization.quant_type={kind}: {type(model).__name__} has experts, which are not held in 8 bits; use "
            "nf4, or adapter: lora"
        )
