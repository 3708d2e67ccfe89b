"""4-bit linear layers (bitsandbytes NF4 or FP4) that also save memory under ZeRO-3.

bitsandbytes' autograd Function saves a view of the packed weight. Under ZeRO-3 that view pins the gathered weight
of every layer until the backward pass, so partitioning saves nothing. Here the Parameter itself is saved: its data is
freed after the forward pass and gathered again before the backward pass. The dequantized weight is never saved.
"""

from functools import partial
from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import nn

from ops import reference
from ops.scaled import frozen_linear
from trainer.config import QuantizationSection
from trainer.contract.known_versions import replaces
from trainer.model.eight_bit import check_input

UNQUANTIZED_LAYERS = ("dt_proj", "prediction_coefs", "correction_coefs")
"""Names of layers that stay unquantized: Mamba-1 (Jamba) reads the weight of `dt_proj` without calling the layer, and
Gemma 3n clips the weights of the other two."""


@replaces("`dequantize_4bit` on a CPU")
def dequantize_weight(weight: torch.Tensor, quant_state: Any, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize a packed 4-bit weight to [O,I] in `dtype`.

    On a CPU, bitsandbytes 0.50.2 uses the wrong scales if a row is not a whole number of blocks (10 to 16 % error for
    rows of 64 with blocks of 128). Those weights are dequantized here instead.
    """
    has_whole_blocks = quant_state.shape[-1] % quant_state.blocksize == 0
    if weight.device.type != "cpu" or has_whole_blocks:
        return dequantize_4bit(weight.data, quant_state).to(dtype)
    state = [quant_state.absmax, quant_state.code]
    if quant_state.nested:
        state += [quant_state.state2.absmax, quant_state.state2.code, quant_state.offset]
    nested_block = quant_state.state2.blocksize if quant_state.nested else 0
    rows, cols = quant_state.shape
    return reference.dequantize_nf4(weight.data, state, rows, cols, quant_state.blocksize, nested_block, dtype)


class Params4bit(bnb.nn.Params4bit):
    """A packed bitsandbytes weight; its `to` returns `self` if the device does not change.

    PEFT's DoRA moves the weight back to the CPU after reading it, and DeepSpeed would not recognize a new Parameter.
    The class must have the same name as bitsandbytes' own, because PEFT checks the name.
    """

    def to(self, *args: Any, **kwargs: Any) -> Any:
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        return self if device is None or device == self.device else super().to(*args, **kwargs)


class FrozenLinear4bit(bnb.nn.Linear4bit):
    """A 4-bit layer that PEFT treats as bitsandbytes' Linear4bit; its forward pass is in ops/scaled.py."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return y[T,O] = x[T,I] W^T + b in the dtype of x, computed in the layer's compute dtype."""
        check_input(x)
        dense = partial(dequantize_weight, quant_state=self.quant_state)
        return frozen_linear(x.to(self.compute_dtype), dense, (self.weight,), self.bias).to(x.dtype)


@replaces("`Linear4bit.forward` and `Params4bit.to`")
def quantize_linear(linear: Any, section: QuantizationSection, compute_dtype: torch.dtype) -> nn.Module:
    """Quantize `linear` to a bitsandbytes Linear4bit that works under every ZeRO stage, and free its weight.

    The storage type is uint8, because the 16-bit engine converts float parameters and would destroy the bits.
    """
    options: dict[str, Any] = {
        "compress_statistics": section.double_quant,
        "quant_type": section.quant_type,
        "quant_storage": torch.uint8,
    }
    sizes, has_bias = (linear.in_features, linear.out_features), linear.bias is not None
    with torch.device("meta"):
        layer = FrozenLinear4bit(*sizes, bias=has_bias, compute_dtype=compute_dtype, **options)
    options["blocksize"] = section.block_size
    packed, state = quantize_4bit(linear.weight.data.to(compute_dtype), **options)
    packed = packed.to(linear.weight.device)
    layer.weight = Params4bit(
        packed, requires_grad=False, quant_state=state, module=layer, bnb_quantized=True, **options
    )
    layer.quant_state = state
    layer.bias = linear.bias
    # Free the weight now: references to the old layer may remain and would keep all original weights in memory.
    linear.weight.data = linear.weight.data.new_empty(0)
    return layer
