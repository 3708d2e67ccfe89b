"""The LoRA operators on a 4-bit base: packed NF4 weights go in, each is dequantised for its product alone.

The dequantised weight is never saved: its memory returns to torch's allocator when the product is queued, and the next
call on the stream gets the same block. In the backward siblings of at most 64 MiB together share a product. Saved for
the backward are the packed Parameter itself and its small state, so that ZeRO-3 can free the gathered bytes in between.

Formulas: ops/reference.py with W = dequantize_nf4(packed, state). Layout: bitsandbytes (Dettmers et al. 2023).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ops import lora, reference

_TAGS = (torch.Tag.pt2_compliant_tag,)

torch.library.define(
    "zerolora::dequantize_nf4",
    "(Tensor packed, Tensor[] state, int rows, int cols, int block, int nested_block, ScalarType dtype) -> Tensor",
    tags=_TAGS,
)
torch.library.define(
    "zerolora::nf4_forward",
    "(Tensor x, Tensor[] packed, Tensor[] states, int[] rows, int block, int nested_block, Tensor[] biases,"
    " Tensor[] downs, Tensor[] ups, float[] scales, float p, Tensor? seed, Tensor? h) -> (Tensor[] ys, Tensor h)",
    tags=_TAGS,
)
torch.library.define(
    "zerolora::nf4_backward",
    "(Tensor[] grads, Tensor x, Tensor[] packed, Tensor[] states, int[] rows, int block, int nested_block,"
    " Tensor[] downs, Tensor[] ups, Tensor h, float[] scales, float p, Tensor? seed, bool need_x, bool need_down,"
    " bool need_up) -> (Tensor grad_x, Tensor[] grad_downs, Tensor[] grad_ups)",
    tags=_TAGS,
)


@dataclass(frozen=True)
class Nf4Weight:
    """A packed weight [rows, cols]: the Parameter, its state for `reference.dequantize_nf4`, the block sizes."""

    packed: Tensor
    state: tuple[Tensor, ...]
    rows: int
    cols: int
    block: int
    nested_block: int

    def layout(self) -> tuple[int, int, int]:
        """What siblings of one call must share."""
        return self.block, self.nested_block, len(self.state)

    @staticmethod
    def of(parameter: Any) -> "Nf4Weight":
        """From a bitsandbytes `Params4bit` that has been quantised; ValueError for another 4-bit format."""
        state = parameter.quant_state
        if state is None or state.quant_type != "nf4":
            found = "not quantised yet" if state is None else f"quant_type={state.quant_type}"
            raise ValueError(f"4-bit weight: {found}; the fused operator takes bnb_4bit_quant_type=nf4")
        rows, cols = state.shape
        if not state.nested:
            return Nf4Weight(parameter, (state.absmax, state.code), rows, cols, state.blocksize, 1)
        inner = state.state2
        offset = torch.as_tensor(state.offset, dtype=torch.float32, device=state.absmax.device)
        tensors = (state.absmax, state.code, inner.absmax, inner.code, offset)
        return Nf4Weight(parameter, tensors, rows, cols, state.blocksize, inner.blocksize)


def _weights(
    packed: Sequence[Tensor],
    states: Sequence[Tensor],
    rows: Sequence[int],
    cols: int,
    block: int,
    nested_block: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    each = len(states) // len(packed)
    split = [states[i * each : (i + 1) * each] for i in range(len(packed))]
    for weight, out in zip(packed, rows, strict=True):
        _check_packed(weight, out, cols)
    return [
        reference.dequantize_nf4(weight, state, out, cols, block, nested_block, dtype)
        for weight, state, out in zip(packed, split, rows, strict=True)
    ]


def reference_dequantize(  # type: ignore[no-untyped-def]
    packed, state, rows, cols, block, nested_block, dtype
) -> Tensor:
    """`dequantize_nf4` in plain torch."""
    _check_packed(packed, rows, cols)
    return reference.dequantize_nf4(packed, state, rows, cols, block, nested_block, dtype)


def reference_forward(  # type: ignore[no-untyped-def]
    x, packed, states, rows, block, nested_block, biases, downs, ups, scales, p, seed, h
) -> tuple[list[Tensor], Tensor]:
    """`nf4_forward` in plain torch."""
    weights = _weights(packed, states, rows, x.shape[-1], block, nested_block, x.dtype)
    return lora.reference_forward(x, weights, biases, downs, ups, scales, p, seed, h)


def reference_backward(  # type: ignore[no-untyped-def]
    grads, x, packed, states, rows, block, nested_block, downs, ups, h, scales, p, seed, need_x, need_down, need_up
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """`nf4_backward` in plain torch."""
    weights = _weights(packed, states, rows, x.shape[-1], block, nested_block, x.dtype)
    return lora.reference_backward(grads, x, weights, downs, ups, h, scales, p, seed, need_x, need_down, need_up)


def _fake_dequantize(packed, state, rows, cols, block, nested_block, dtype):  # type: ignore[no-untyped-def]
    return packed.new_empty((rows, cols), dtype=dtype)


def _fake_forward(  # type: ignore[no-untyped-def]
    x, packed, states, rows, block, nested_block, biases, downs, ups, scales, p, seed, h
):
    return lora.fake_forward(x, rows, downs, ups, scales, p, h)


def _fake_backward(  # type: ignore[no-untyped-def]
    grads, x, packed, states, rows, block, nested_block, downs, ups, h, scales, p, seed, need_x, need_down, need_up
):
    return lora.fake_backward(x, downs, ups, need_x, need_down, need_up)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[list[Tensor], Tensor]) -> None:
    x, packed, states, rows, block, nested_block, biases, downs, ups, scales, p, seed, h = inputs
    lora.refuse_given(h)
    ctx.rows, ctx.blocks, ctx.scales, ctx.p = rows, (block, nested_block), scales, p
    ctx.siblings, ctx.states, ctx.biases = len(packed), len(states), len(biases)
    ctx.save_for_backward(x, output[1], seed, *packed, *downs, *ups, *states)


def _backward(ctx: Any, grads: list[Tensor], _: Tensor | None) -> tuple[Any, ...]:
    n = ctx.siblings
    x, h, seed, *rest = ctx.saved_tensors
    packed, downs, ups, states = rest[:n], rest[n : 2 * n], rest[2 * n : 3 * n], rest[3 * n :]
    need = ctx.needs_input_grad
    ctx.need_x = need[0]
    flags = need[0], any(need[7]), any(need[8])
    result = torch.ops.zerolora.nf4_backward(
        grads, x, packed, states, ctx.rows, *ctx.blocks, downs, ups, h, ctx.scales, ctx.p, seed, *flags
    )
    grad_x, grad_downs, grad_ups = lora.grads_of_adapters(ctx, result, n)
    bias_grads = lora.grads_of_biases(grads, need[6]) if ctx.biases else []
    no_packed, no_states = [None] * n, [None] * ctx.states
    return grad_x, no_packed, no_states, None, None, None, bias_grads, grad_downs, grad_ups, None, None, None, None


torch.library.impl("zerolora::dequantize_nf4", "cpu")(reference_dequantize)
torch.library.impl("zerolora::nf4_forward", "cpu")(reference_forward)
torch.library.impl("zerolora::nf4_backward", "cpu")(reference_backward)
torch.library.register_fake("zerolora::dequantize_nf4")(_fake_dequantize)
torch.library.register_fake("zerolora::nf4_forward")(_fake_forward)
torch.library.register_fake("zerolora::nf4_backward")(_fake_backward)
torch.library.register_autograd("zerolora::nf4_forward", _backward, setup_context=_setup_context)
torch.library.register_autograd("zerolora::nf4_backward", lora.refuse_second_derivative)
_FORWARD = torch.ops.zerolora.nf4_forward.default


def _check_packed(packed: Tensor, rows: int, cols: int) -> None:
    size = packed.numel() * packed.element_size()
    if size * 2 < rows * cols:
        raise ValueError(
            f"packed weight of {size} bytes for [{rows}, {cols}]: {(rows * cols + 1) // 2} are needed;"
            " under ZeRO-3 gather the parameter first"
        )


def nf4_group(
    x: Tensor,
    weights: Sequence[Nf4Weight],
    biases: Sequence[Tensor | None],
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    scales: Sequence[float],
    dropout: float = 0.0,
) -> list[Tensor]:
    """`lora.lora_group` for packed weights, computed in the type of x.

    Raises:
        ValueError: as `lora.lora_group`; a packed weight that is not gathered; siblings quantised differently.
    """
    first, rows = weights[0], [weight.rows for weight in weights]
    for weight in weights:
        if weight.cols != x.shape[-1] or weight.packed.device != x.device:
            found = f"packed weight [{weight.rows}, {weight.cols}] on {weight.packed.device}"
            raise ValueError(f"{found} for x {tuple(x.shape)} on {x.device}: expected [O, {x.shape[-1]}] beside x")
        if weight is not first and weight.layout() != first.layout():
            raise ValueError("siblings quantised with different block sizes: call the operator for each alone")
    ys, _ = _FORWARD(
        x,
        [weight.packed for weight in weights],
        [tensor for weight in weights for tensor in weight.state],
        rows,
        first.block,
        first.nested_block,
        lora.fill_biases(x, biases, rows),
        downs,
        ups,
        scales,
        dropout,
        lora.draw_seed(x, dropout),
        None,
    )
    return ys
