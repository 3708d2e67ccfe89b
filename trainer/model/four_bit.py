"""4-bit linear layers (bitsandbytes NF4 or FP4) that ZeRO-3 may free and gather between forward and backward.

bitsandbytes' own autograd Function keeps a view of the packed weight: under ZeRO-3 that view pins the gathered weight
of every layer until the backward pass, so nothing is saved by partitioning. Here the Parameter itself is saved; what it
points to is freed with the partition and gathered again before it is read. The dequantised weight is never saved.
"""

from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import dequantize_4bit, dequantize_blockwise, quantize_4bit
from torch import nn

from trainer.config import QuantizationSection
from trainer.contract.replacements import replaces
from trainer.parallel.engine.linear_layers import is_linear

READ_DIRECTLY = ("dt_proj",)
"""The time step of Mamba-1 (Jamba): its weight is multiplied without calling the layer."""


class _FrozenLinear4bit(torch.autograd.Function):
    """y[T,O] = x[T,I] W^T with W[O,I] dequantised on the fly; dX = dY W. W gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, quant_state: Any) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.quant_state = quant_state
        return torch.nn.functional.linear(x, dequantized(weight, quant_state, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        (weight,) = ctx.saved_tensors
        (grad_y,) = grads
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return grad_y.matmul(dequantized(weight, ctx.quant_state, grad_y.dtype)), None, None


@replaces(
    "`dequantize_4bit` on a CPU",
    library="bitsandbytes",
    read_in="0.50.2",
    why="it uses the wrong scales if a row is not a whole number of blocks: 10 to 16 % error",
    active="adapter: qlora on a CPU",
    test="tests/unit/test_workarounds.py: test_bitsandbytes_takes_wrong_scales_on_a_cpu",
)
def dequantized(weight: torch.Tensor, quant_state: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight [O,I] that packed 4-bit values stand for, in `dtype`.

    On a CPU bitsandbytes 0.50.2 takes the wrong scales where a row does not hold a whole number of blocks (10 to 16 %
    error for rows of 64 in blocks of 128): there the code book is read here.
    """
    rows_hold_whole_blocks = quant_state.shape[-1] % quant_state.blocksize == 0
    if weight.device.type != "cpu" or rows_hold_whole_blocks:
        return dequantize_4bit(weight.data, quant_state).to(dtype)
    scales = quant_state.absmax
    if quant_state.nested:
        scales = dequantize_blockwise(scales, quant_state.state2) + quant_state.offset
    packed = weight.data.reshape(-1)
    codes = torch.stack([packed >> 4, packed & 15], dim=1).reshape(-1).long()  # the first of two is in the high bits
    count = quant_state.shape.numel()
    scale_of_each = scales.float().repeat_interleave(quant_state.blocksize)[:count]
    return (quant_state.code[codes[:count]] * scale_of_each).view(quant_state.shape).to(dtype)


class Params4bit(bnb.nn.Params4bit):
    """bitsandbytes' packed weight, under the name that PEFT looks for, staying itself when moved to where it is.

    PEFT's DoRA moves the weight "back to the CPU" after reading it; a new Parameter would be unknown to DeepSpeed.
    """

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As torch.Tensor.to, but without a copy when nothing changes."""
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        return self if device is None or device == self.device else super().to(*args, **kwargs)


class FrozenLinear4bit(bnb.nn.Linear4bit):
    """bitsandbytes' 4-bit layer (and so a Linear4bit to PEFT) with the forward above."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y[T,O] = x[T,I] W^T + b in the layer's compute dtype, returned in that of x."""
        y = _FrozenLinear4bit.apply(x.to(self.compute_dtype), self.weight, self.quant_state)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.to(x.dtype)


def should_quantize(path: str, module: nn.Module) -> bool:
    """Every linear layer is quantised but those of which a model reads the weight itself; the caller keeps the head."""
    return is_linear(module) and path.rpartition(".")[2] not in READ_DIRECTLY


@replaces(
    "`Linear4bit.forward` and `Params4bit.to`",
    library="bitsandbytes",
    read_in="0.50.2",
    why="the forward keeps a view of the packed weight until the backward pass, memory that ZeRO-3 has to free; "
    "`to` creates a new Parameter even if nothing moves",
    active="adapter: qlora",
    test="tests/unit/test_workarounds.py: test_bitsandbytes_keeps_the_packed_weight_until_the_backward_pass, "
    "test_bitsandbytes_makes_a_new_parameter_where_nothing_moves",
    upstream="https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2034 (the kept weight)",
)
def quantized_linear(linear: nn.Module, section: QuantizationSection, compute_dtype: torch.dtype) -> nn.Module:
    """A bitsandbytes Linear4bit with the weights of `linear`, which loses them; it works under every ZeRO stage.

    The packed storage is uint8: with a float storage type the 16-bit engine would convert, and so destroy, the bits.
    """
    assert isinstance(linear, nn.Linear)
    device = linear.weight.device
    with torch.device("meta"):
        layer = FrozenLinear4bit(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            compute_dtype=compute_dtype,
            compress_statistics=section.double_quant,
            quant_type=section.quant_type,
            quant_storage=torch.uint8,
        )
    packed, state = quantize_4bit(
        linear.weight.data.to(compute_dtype),
        blocksize=section.block_size,
        compress_statistics=section.double_quant,
        quant_type=section.quant_type,
        quant_storage=torch.uint8,
    )
    layer.weight = Params4bit(
        packed.to(device),
        requires_grad=False,
        quant_state=state,
        blocksize=section.block_size,
        compress_statistics=section.double_quant,
        quant_type=section.quant_type,
        quant_storage=torch.uint8,
        module=layer,
        bnb_quantized=True,
    )
    layer.quant_state = state
    layer.bias = linear.bias
    # Others may still hold the old layer for a while; its memory goes now, or the whole model would add up.
    linear.weight.data = linear.weight.data.new_empty(0)
    return layer
