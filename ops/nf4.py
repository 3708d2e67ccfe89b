"""LoRA operators for 4-bit base weights: each packed NF4 weight is dequantized only for its matmul.

A dequantized weight is never saved: its memory returns to torch's allocator once the matmul is queued, and the next
call on the stream reuses it. In the backward, projections of at most 64 MiB in total are computed in one matmul. The
packed Parameter itself and its small state are saved, so that ZeRO-3 can free the gathered bytes in between.

Formulas: ops/reference.py with W = dequantize_nf4(packed, state). Layout: bitsandbytes (Dettmers et al. 2023).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ops import derivative, lora, reference


@dataclass(frozen=True)
class Nf4Weight:
    """A packed weight [rows, cols] with its state for `reference.dequantize_nf4` and the block sizes."""

    packed: Tensor
    state: tuple[Tensor, ...]
    rows: int
    cols: int
    block: int
    nested_block: int

    def layout(self) -> tuple[int, int, int]:
        """Return the properties that all weights of a call must share: block sizes and length of the state."""
        return self.block, self.nested_block, len(self.state)

    @staticmethod
    def from_parameter(parameter: Any) -> "Nf4Weight":
        """Wrap a quantized bitsandbytes `Params4bit`. Raises ValueError for other formats."""
        state = parameter.quant_state
        if state is None or state.quant_type != "nf4":
            problem = "not quantized yet" if state is None else f"quant_type={state.quant_type}"
            raise ValueError(f"4-bit weight: {problem}; the fused operator needs bnb_4bit_quant_type=nf4")
        rows, cols = state.shape
        if not state.nested:
            return Nf4Weight(parameter, (state.absmax, state.code), rows, cols, state.blocksize, 1)
        inner = state.state2
        offset = torch.as_tensor(state.offset, dtype=torch.float32, device=state.absmax.device)
        tensors = (state.absmax, state.code, inner.absmax, inner.code, offset)
        return Nf4Weight(parameter, tensors, rows, cols, state.blocksize, inner.blocksize)


def _dequantize(op: Any) -> list[Tensor]:
    length = len(op.states) // len(op.packed)
    sizes = op.x.shape[-1], op.block, op.nested_block, op.x.dtype
    return [
        reference.dequantize_nf4(weight, op.states[i * length : (i + 1) * length], out, *sizes)
        for i, (weight, out) in enumerate(zip(op.packed, op.rows, strict=True))
    ]


def _pack_arguments(x: Tensor, weights: Sequence[Nf4Weight]) -> tuple[Any, ...]:
    """Return the operator's arguments. Raises ValueError if weights do not match x or one another."""
    first = weights[0]
    for weight in weights:
        if weight.cols != x.shape[-1] or weight.packed.device != x.device:
            actual = f"packed weight has shape [{weight.rows}, {weight.cols}] on {weight.packed.device}"
            raise ValueError(
                f"{actual}, but x has shape {tuple(x.shape)} on {x.device}: expected [O, {x.shape[-1]}] on its device"
            )
        if weight is not first and weight.layout() != first.layout():
            raise ValueError("weights are quantized with different block sizes: call the operator for each separately")
    packed, states = [weight.packed for weight in weights], [tensor for weight in weights for tensor in weight.state]
    return packed, states, [weight.rows for weight in weights], first.block, first.nested_block


derivative.define(
    "dequantize_nf4(Tensor packed, Tensor[] state, int rows, int cols, int block, int nested_block, ScalarType dtype)"
    " -> Tensor",
    reference.dequantize_nf4,
    lambda packed, _, rows, cols, *others: packed.new_empty((rows, cols), dtype=others[-1]),
)  # fmt: skip
nf4_group = lora.FormatOperators(
    "nf4",
    "Tensor[] packed, Tensor[] states, int[] rows, int block, int nested_block",
    pack=_pack_arguments,
    outs=lambda op: op.rows,
    check=lambda op: None,
    forward=lambda op, h: lora.dense_forward(op, h, _dequantize(op)),
    backward=lambda op: lora.dense_backward(op, _dequantize(op)),
)
