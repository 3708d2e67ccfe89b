"""8-bit linear layers (FP8 e4m3 or int8), quantized at load time or already stored in 8 bits.

With one scale per row, matmuls also run in 8 bits (ops/eight_bit.py). With one scale per block, or with `exact=True`,
weights are dequantized for each matmul (ops/scaled.py).

Values are stored as uint8 (e4m3) or int8, because the 16-bit engine converts every float parameter and would destroy
the bits. For the same reason scales are neither parameters nor buffers; every rank keeps all of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ops
from ops.eight_bit import STORAGE
from ops.reference import dequantize_blocks, quantize_rows
from trainer.config import UserError

MIN_FP8_CAPABILITY = (8, 9)
"""Lowest compute capability that supports FP8 matmuls."""
ROWS_PER_CHUNK = 4096  # an fp32 copy of a whole weight would take four times the memory of the result


class FrozenLinear8bit(nn.Linear):
    """A frozen linear layer with 8-bit weight values [O,I] and one scale per `block` (rows, columns).

    PEFT treats it as an nn.Linear. With `exact`, the weights are dequantized and matmuls run in the compute dtype.
    """

    def __init__(
        self,
        linear: Any,
        values: torch.Tensor,
        scales: torch.Tensor,
        block: tuple[int, int],
        *,
        compute_dtype: torch.dtype,
        exact: bool,
    ) -> None:
        """Take over the bias of `linear`, and free its weight.

        `values` [O,I] are uint8 (e4m3) or int8; `scales` [ceil(O/rows), ceil(I/columns)] are fp32.
        """
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.compute_dtype, self.block = compute_dtype, block
        self.exact = exact or block != (1, linear.in_features)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.scales = scales
        self.bias = linear.bias
        # Free the weight now: references to the old layer may remain and would keep all original weights in memory.
        linear.weight.data = linear.weight.data.new_empty(0)

    @classmethod
    def from_linear(cls, linear: Any, kind: str, compute_dtype: torch.dtype) -> "FrozenLinear8bit":
        """Quantize `linear` with one scale per row, and free its weight."""
        parts = linear.weight.data.to(compute_dtype).split(ROWS_PER_CHUNK)
        values, scales = zip(*(quantize_rows(part, STORAGE[kind]) for part in parts), strict=True)
        block = (1, linear.in_features)
        column = torch.cat(scales)[:, None]
        return cls(linear, torch.cat(values), column, block, compute_dtype=compute_dtype, exact=False)

    @property
    def row_scale(self) -> torch.Tensor:
        """Scales as [O]; valid only with one scale per row."""
        return self.scales.view(-1)

    @property
    def packed(self) -> ops.EightBitWeight:
        return ops.EightBitWeight(self.weight, self.row_scale)

    @property
    def scaled(self) -> ops.ScaledWeight:
        return ops.ScaledWeight(self.weight, self.scales, self.block)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantize_blocks(self.weight.data, self.scales, self.block, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        check_input(x)
        converted = x.to(self.compute_dtype)
        if self.exact:
            return ops.scaled_linear(converted, self.scaled, self.bias).to(x.dtype)
        return ops.eight_bit_linear(converted, self.packed, self.bias).to(x.dtype)

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.scales = self.scales.to(self.weight.device)
        return self


def check_input(x: torch.Tensor) -> None:
    """Raise UserError if `x` is not floating point, which means that the model cast it to the packed weight's dtype."""
    if not x.is_floating_point():
        raise UserError(
            "adapter=qlora: this model converts a linear layer's input to the dtype of the packed weight; "
            "use adapter: lora"
        )


def check_fp8_support(kind: str, device: torch.device) -> None:
    """Raise UserError if `kind` is fp8 and the GPU does not support FP8 matmuls; a CPU emulates them."""
    if kind != "fp8" or device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_FP8_CAPABILITY:
        name, version = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        raise UserError(
            f"quantization.quant_type=fp8: {name} has compute capability {version}, but FP8 needs 8.9 (Ada) or newer; "
            "use quantization.quant_type: int8"
        )
