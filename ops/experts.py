"""MoE operator with LoRA: `zerolora::experts_forward` and `zerolora::experts_backward`.

Legend: T tokens, K experts per token, N = T K rows (token-expert pairs, sorted by expert), E experts, H hidden, I
intermediate, R rank; gate_up[E,2I,H], down[E,H,I] frozen, A_gu[E,R,H], B_gu[E,2I,R], A_d[E,R,I], B_d[E,H,R].

    for a row n of token t, expert e and weight w
      h_gu = s_gu (m*x_t) A_gu^T     u = x_t gate_up^T + bias + h_gu B_gu^T     a = f(u_gate) u_up
      h_d  = s_d (m*a) A_d^T         o = a down^T + bias + h_d B_d^T            y_t += w o

The backward pass does not need o. With g = dy down + m*((s_d dy B_d) A_d), the gradient of a is w g, and the gradient
of w is a.g + dy.bias. Saved for the backward: x, the frozen product u0 = x gate_up^T [N,2I], h_gu, h_d and the order of
the rows. a is recomputed; nothing of size N x H is saved. Frozen weights get no gradient.

Rows are sorted on the device and the counts stay there: no shape depends on the routing, and calls do not
synchronize. The dropout mask of gate_up is drawn for a matrix [N,H] with row index t K + k. The mask of
down is drawn for a matrix [N,I] with another seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ops import derivative, experts_plain, lora
from ops.seeds import draw_seed

Activation = Literal["silu", "gelu", "gelu_tanh", "clamped"]
Storage = Literal["plain", "transposed", "nf4", "mxfp4", "eight_bit", "int4", "fp4"]
# gate_up and down: `ExpertMatrix.tensors`; shape: E, I, H, block, nested block; modes: both storages, the activation,
# "interleaved" or "halves"; scalars: s_gu, s_d, p, alpha, limit.
_WEIGHTS = "Tensor[] gate_up, Tensor[] down, Tensor[] biases, Tensor[] gate_up_factors, Tensor[] down_factors"
_OPTIONS = "int[] shape, str[] modes, float[] scalars, Tensor? seed"


@dataclass(frozen=True)
class ExpertMatrix:
    """One frozen matrix per expert, [E, rows, cols], in its storage format.

    plain       (weight[E,rows,cols],)
    transposed  (weight[E,cols,rows],), as gpt-oss stores its 16-bit weights
    nf4         (packed, absmax[E,b], code[16]) or with double quantization (packed, absmax[E,b] uint8, code[16],
                nested absmax[E,c], nested code[256], offset[E]); packed: E x rows x cols / 2 bytes of any shape; each
                expert is quantized separately: b = rows cols / block, c = ceil(b / nested_block)
    mxfp4       (blocks[E,rows,cols/32,16], scales[E,rows,cols/32]), both uint8
    eight_bit   (values[E,rows,cols] uint8 (e4m3) or int8, scales[E,b,c] float32): a scale per row (b = rows,
                c = 1, block 0) or per block: b = ceil(rows / block), c = ceil(cols / nested_block)
    int4, fp4   the five tensors of `reference.dequantize_groups`, in groups of equal length
    """

    storage: Storage
    tensors: tuple[Tensor, ...]
    experts: int
    rows: int
    cols: int
    block: int = 0
    nested_block: int = 0
    source: Tensor | None = None
    """Buffer of which all `tensors` are views. The backward saves the buffer instead of the views, because ZeRO-3 may
    free it after the forward and gather it again.
    """

    @staticmethod
    def from_plain(weight: Tensor, transposed: bool = False) -> "ExpertMatrix":
        """Wrap 16-bit or fp32 weights [E, rows, cols], or transposed [E, cols, rows]."""
        experts, rows, cols = weight.shape
        if transposed:
            return ExpertMatrix("transposed", (weight,), experts, cols, rows)
        return ExpertMatrix("plain", (weight,), experts, rows, cols)

    @staticmethod
    def from_nf4(
        packed: Tensor, state: Sequence[Tensor], rows: int, cols: int, block: int, nested_block: int = 0
    ) -> "ExpertMatrix":
        """Wrap bitsandbytes NF4 weights of consecutive experts. Raises ValueError if a block would cross experts."""
        if rows * cols % block:
            raise ValueError(
                f"experts [{rows}, {cols}], NF4 blocks of {block}: a block must not cross experts; use smaller blocks"
            )
        return ExpertMatrix("nf4", (packed, *state), state[0].shape[0], rows, cols, block, nested_block)

    @staticmethod
    def from_mxfp4(blocks: Tensor, scales: Tensor) -> "ExpertMatrix":
        """Wrap MXFP4 blocks [E, rows, cols/32, 16] and scales [E, rows, cols/32], as stored in gpt-oss checkpoints."""
        experts, rows, groups = scales.shape
        return ExpertMatrix("mxfp4", (blocks, scales), experts, rows, groups * 32)

    @staticmethod
    def from_8bit(values: Tensor, scales: Tensor, block: Sequence[int] | None = None) -> "ExpertMatrix":
        """Wrap FP8 or int8 values with a scale per row or, if `block` is given, per block of (rows, columns)."""
        experts, rows, cols = values.shape
        high, wide = block or (0, 0)
        return ExpertMatrix("eight_bit", (values, scales), experts, rows, cols, high, wide)

    @staticmethod
    def from_groups(sections: Sequence[Tensor], is_float: int) -> "ExpertMatrix":
        """Wrap 4-bit weights with a scale per group of columns; see `reference.dequantize_groups`."""
        experts, rows, half = sections[0].shape
        return ExpertMatrix("fp4" if is_float else "int4", tuple(sections), experts, rows, 2 * half)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [E, rows, cols] in `dtype`; with `transposed` storage, as a view."""
        shape = [self.experts, self.rows, self.cols, self.block, self.nested_block]
        return experts_plain.build_dense_weight(self.tensors, self.storage, shape, dtype)


@dataclass(frozen=True)
class ExpertWeights:
    """Frozen weights: gate_up [E, 2I, H], down [E, H, I], biases [E, 2I] and [E, H] (both or none).

    interleaved: rows of gate_up are gate, up, gate, up, ... (gpt-oss) instead of all gates first. alpha and limit are
    parameters of the activation `clamped`.
    """

    gate_up: ExpertMatrix
    down: ExpertMatrix
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: Activation = "silu"
    interleaved: bool = False
    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True)
class ExpertAdapter:
    """LoRA factors, None for a matrix without an adapter. The rows of B_gu are in gate_up's order."""

    gate_up_down: Tensor | None = None  # A_gu [E, R, H]
    gate_up_up: Tensor | None = None  # B_gu [E, 2I, R]
    down_down: Tensor | None = None  # A_d [E, R, I]
    down_up: Tensor | None = None  # B_d [E, H, R]
    gate_up_scale: float = 1.0
    down_scale: float = 1.0
    dropout: float = 0.0


def experts_mlp(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weights: ExpertWeights,
    adapter: ExpertAdapter | None = None,
) -> Tensor:
    """Return y[T,H], the weighted sum of the experts' outputs (formulas: module docstring).

    hidden [T,H], top_k_index [T,K] of experts 0 to E - 1 (other values contribute nothing), top_k_weights [T,K].
    Differentiable in hidden, top_k_weights and the adapter's factors.
    Raises ValueError for mismatched shapes, types or devices, and for an unsupported rank or dropout.
    """
    adapter = adapter or ExpertAdapter()
    gate_up, down = weights.gate_up, weights.down
    biases = [bias for bias in (weights.gate_up_bias, weights.down_bias) if bias is not None]
    if len(biases) == 1:
        raise ValueError("gate_up_bias and down_bias: only one is given; pass both, or neither")
    shape = [gate_up.experts, down.cols, gate_up.cols, gate_up.block, gate_up.nested_block]
    if (gate_up.rows, down.rows, down.experts) != (2 * down.cols, gate_up.cols, gate_up.experts):
        raise ValueError(
            f"gate_up has shape [{gate_up.experts}, {gate_up.rows}, {gate_up.cols}], down [{down.experts}, {down.rows},"
            f" {down.cols}]: expected [E, 2I, H] and [E, H, I]"
        )
    packed = {"nf4", "eight_bit"} & {gate_up.storage, down.storage}
    if packed and (gate_up.block, gate_up.nested_block) != (down.block, down.nested_block):
        raise ValueError("gate_up and down are quantized with different block sizes: use one size")
    modes = [gate_up.storage, down.storage, weights.activation, "interleaved" if weights.interleaved else "halves"]
    scalars = [adapter.gate_up_scale, adapter.down_scale, adapter.dropout, weights.alpha, weights.limit]
    return _FORWARD(
        hidden,
        top_k_index,
        top_k_weights,
        gate_up.tensors,
        down.tensors,
        biases,
        _check_pair(adapter.gate_up_down, adapter.gate_up_up),
        _check_pair(adapter.down_down, adapter.down_up),
        shape,
        modes,
        scalars,
        draw_seed(hidden, adapter.dropout, 2),
        gate_up.source,
        down.source,
    )[0]


def _check_pair(down: Tensor | None, up: Tensor | None) -> list[Tensor]:
    if down is None or up is None:
        if down is not up:
            raise ValueError("expert adapter: only one factor is given; pass A and B, or neither")
        return []
    return [down, up]


def check_arguments(  # type: ignore[no-untyped-def]
    x, index, weights, gate_up_factors, down_factors, shape, modes, scalars, seed
) -> None:
    E, inner, H = shape[:3]
    if x.dim() != 2 or x.shape[1] != H:
        raise ValueError(f"hidden states have shape {tuple(x.shape)}, but the experts expect [T, {H}]")
    if index.dim() != 2 or index.shape != weights.shape or index.shape[0] != x.shape[0]:
        shapes = f"top_k_index has shape {tuple(index.shape)}, top_k_weights {tuple(weights.shape)}"
        raise ValueError(f"{shapes}, hidden {tuple(x.shape)}: expected [T, K], [T, K] and [T, H]")
    if not 0.0 <= scalars[2] < 1.0:
        raise ValueError(f"dropout={scalars[2]}: must lie in [0, 1)")
    if scalars[2] > 0.0 and seed is None:
        raise ValueError(f"dropout={scalars[2]}: seeds are missing; pass two int64 on the same device as hidden")
    if modes[2] not in ("silu", "gelu", "gelu_tanh", "clamped"):
        raise ValueError(f"activation={modes[2]}: expected silu, gelu, gelu_tanh or clamped")
    for name, factors, D, out in (("gate_up", gate_up_factors, H, 2 * inner), ("down", down_factors, inner, H)):
        if not factors:
            continue
        a, b = factors
        rank = a.shape[1] if a.dim() == 3 else 0
        if tuple(a.shape) != (E, rank, D) or tuple(b.shape) != (E, out, rank):
            raise ValueError(
                f"adapter of {name}: A is {tuple(a.shape)}, B {tuple(b.shape)}; expected [{E}, R, {D}], [{E}, {out}, R]"
            )
        if not 1 <= rank <= lora.MAX_RANK:
            raise ValueError(f"r={rank}: must be 1 to {lora.MAX_RANK}")
        if {a.dtype, b.dtype} - {x.dtype, torch.float32} or a.dtype != b.dtype:
            raise ValueError(
                f"hidden is {x.dtype}, A {a.dtype}, B {b.dtype}: A and B must share one dtype, hidden's or float32"
            )
        if a.device != x.device or b.device != x.device:
            raise ValueError(f"hidden on {x.device}, A on {a.device}, B on {b.device}: move them together")


def _fake_forward(  # type: ignore[no-untyped-def]
    x, index, weights, gate_up, down, biases, gate_up_factors, down_factors, shape, modes, scalars, seed, *_sources
):
    check_arguments(x, index, weights, gate_up_factors, down_factors, shape, modes, scalars, seed)
    N = index.numel()
    return (
        x.new_empty(x.shape),
        x.new_empty((N, 2 * shape[1])),
        x.new_empty((N, experts_plain.count_h_columns(gate_up_factors))),
        x.new_empty((N, experts_plain.count_h_columns(down_factors))),
        x.new_empty(N, dtype=torch.int32),
        x.new_empty(shape[0], dtype=torch.int32),
    )


def _fake_backward(  # type: ignore[no-untyped-def]
    grad, x, weights, gate_up, down, biases, gate_up_factors, down_factors, u0, h_gu, h_d, order, ends, shape, modes,
    scalars, seed, need_x, need_weights, need_factors
):  # fmt: skip
    like = [[f.new_empty(f.shape) for f in pair] if need_factors else [] for pair in (gate_up_factors, down_factors)]
    return x.new_empty(x.shape if need_x else 0), weights.new_empty(weights.shape if need_weights else 0), *like


def _reference_forward(x, index, weights, gate_up, down, biases, *adapters_and_options):  # type: ignore[no-untyped-def]
    *options, _, _ = adapters_and_options  # without the sources
    check_arguments(x, index, weights, *options)
    return experts_plain.forward(x, index, weights, gate_up, down, biases, *options)


class _BufferViews:
    """Views of a buffer that can be rebuilt after the buffer has moved."""

    def __init__(self, tensors: Sequence[Tensor], source: Tensor | None) -> None:
        self.saved = list(tensors) if source is None else [source]
        self._views: list[tuple[int, torch.dtype, torch.Size]] | None = None
        if source is not None:
            origin = source.storage_offset() * source.element_size()
            self._views = [
                (int(view.storage_offset() * view.element_size() - origin), view.dtype, view.shape) for view in tensors
            ]

    def rebuild(self, saved: Sequence[Tensor]) -> list[Tensor]:
        if self._views is None:
            return list(saved)
        buffer = saved[0].detach().view(torch.uint8)
        return [
            buffer.narrow(0, begin, shape.numel() * dtype.itemsize).view(dtype).view(shape)
            for begin, dtype, shape in self._views
        ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, weights, gate_up, down, biases, gate_up_factors, down_factors, *rest = inputs
    ctx.shape, ctx.modes, ctx.scalars, seed, *sources = rest
    ctx.input_lengths = [len(tensors) for tensors in (gate_up, down, biases, gate_up_factors, down_factors)]
    ctx.views = [_BufferViews(tensors, source) for tensors, source in zip((gate_up, down), sources, strict=True)]
    lists = *(views.saved for views in ctx.views), biases, gate_up_factors, down_factors
    ctx.lengths = [len(tensors) for tensors in lists]
    ctx.save_for_backward(x, weights, seed, *output[1:], *(tensor for tensors in lists for tensor in tensors))
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    nothing, others = [[None] * length for length in ctx.input_lengths], [None] * 6
    if grad is None:
        return None, None, None, *nothing, *others
    x, weights, seed, *rest = ctx.saved_tensors
    results, rest, lists = rest[:5], rest[5:], []
    for length in ctx.lengths:
        lists.append(rest[:length])
        rest = rest[length:]
    lists[:2] = [views.rebuild(tensors) for views, tensors in zip(ctx.views, lists[:2], strict=True)]
    need = ctx.needs_input_grad
    if any(any(need[i]) for i in (3, 4, 5)):
        raise ValueError("gate_up, down or a bias requires a gradient: the operator does not compute it; freeze them")
    flags = need[0], need[2], any(need[6]) or any(need[7])
    grad_x, grad_weights, *factors = torch.ops.zerolora.experts_backward(
        grad, x, weights, *lists, *results, ctx.shape, ctx.modes, ctx.scalars, seed, *flags
    )
    factor_grads = [pair or none for pair, none in zip(factors, nothing[3:], strict=True)]
    inputs = grad_x if need[0] else None, None, grad_weights if need[2] else None
    return *inputs, *nothing[:3], *factor_grads, *others


_FORWARD = derivative.define(
    f"experts_forward(Tensor x, Tensor index, Tensor weights, {_WEIGHTS}, {_OPTIONS}, Tensor? gate_up_source,"
    " Tensor? down_source) -> (Tensor y, Tensor u0, Tensor h_gu, Tensor h_d, Tensor order, Tensor ends)",
    _reference_forward, _fake_forward,
)  # fmt: skip
derivative.define(
    f"experts_backward(Tensor grad, Tensor x, Tensor weights, {_WEIGHTS}, Tensor u0, Tensor h_gu, Tensor h_d,"
    f" Tensor order, Tensor ends, {_OPTIONS}, bool need_x, bool need_weights, bool need_factors)"
    " -> (Tensor grad_x, Tensor grad_weights, Tensor[] grad_gate_up_factors, Tensor[] grad_down_factors)",
    experts_plain.backward, _fake_backward,
)  # fmt: skip
torch.library.register_autograd("zerolora::experts_forward", _backward, setup_context=_setup_context)
torch.library.register_autograd("zerolora::experts_backward", derivative.reject_second_derivative)
