"""RMSNorm, the gating of SwiGLU and GeGLU, and rotary embedding, with recomputation of cheap results.

A norm with a frozen weight skips the weight's gradient, a sum over all tokens. A result that costs one pass over memory
(the norm's output, f(gate) up) need not be saved for the backward of the layer that reads it:
`recompute_instead_of_saving` replaces it with a function that recomputes it from inputs that are saved anyway.

Legend: T tokens (leading dimensions flattened), D width, B batch, H heads, R rotary width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ops.derivative import define, reject_second_derivative


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Compute y = x rstd (offset + w), rstd = (mean(x^2) + eps)^(-1/2) over the last dimension, in fp32.

    x [..., D], weight [D] of the same type. With offset 0 the normalized value is rounded to the type of x before it is
    multiplied by the weight, as in Llama; otherwise only the result is rounded, as in Gemma. Zhang and Sennrich 2019,
    https://arxiv.org/abs/1910.07467. Raises ValueError for mismatched shapes or types, and in the backward pass if the
    weight requires a gradient.
    """
    return _NORM(x, weight, eps, offset)[0]


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Compute h = silu(gate) up, with silu(v) = v / (1 + exp(-v)) rounded to the type of `gate`.

    Raises ValueError unless gate and up have the same shape and type. Shazeer 2020, https://arxiv.org/abs/2002.05202.
    """
    return _SILU_MUL(gate, up)


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Compute h = gelu(gate) up, gelu(v) = v (1 + tanh(sqrt(2/pi) (v + 0.044715 v^3))) / 2, rounded as in `silu_mul`.

    Raises ValueError unless gate and up have the same shape and type. Paper: see `silu_mul`.
    """
    return _GELU_MUL(gate, up)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q and k by their positions: x cos + [-x2, x1] sin for the halves [x1, x2] of the first R elements.

    q [B, H, T, D] and k [B, H', T, D] of any strides, cos and sin [B or 1, T, R], all of one type; elements past R are
    unchanged. The results are stored as [B, T, H, D], the layout that attention reads. Su et al. 2021,
    https://arxiv.org/abs/2104.09864. Raises ValueError for mismatched shapes or types.
    """
    return _ROPE(q, k, cos, sin)


@contextmanager
def recompute_instead_of_saving(result: Tensor, recompute: Callable[[], Tensor]) -> Iterator[None]:
    """Save `recompute` instead of `result` for the backward of operations in this context.

    `recompute()` must return the same values, in any shape, from tensors that are saved anyway.
    """
    address, elements, dtype = result.untyped_storage()._cdata, result.numel(), result.dtype

    def pack(tensor: Tensor) -> Any:
        if tensor.untyped_storage()._cdata == address and tensor.numel() == elements and tensor.dtype == dtype:
            if tensor.is_contiguous():
                return tensor.shape, recompute
        return tensor

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        shape, recompute = packed
        with torch.no_grad():
            result: Tensor = recompute().view(shape)
        return result

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    x_wide = _upcast(x)
    normal = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    if offset == 0.0:
        return normal.to(x.dtype) * weight
    return (normal * (offset + _upcast(weight))).to(x.dtype)


def reference_rms_norm_forward(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Compute y [..., D] and rstd [T] of `rms_norm` in plain torch."""
    _check_norm(x, weight)
    rstd = torch.rsqrt(_upcast(x).square().mean(-1) + eps).reshape(-1)
    return plain_rms_norm(x, weight, eps, offset).contiguous(), rstd


def reference_rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float) -> Tensor:
    """Compute dx = rstd (g - n mean(g n)) with g = grad (offset + w), n = x rstd."""
    rstd = rstd.view(*x.shape[:-1], 1)
    normal, g = _upcast(x) * rstd, _upcast(grad) * (offset + _upcast(weight))
    return (rstd * (g - normal * (g * normal).mean(-1, keepdim=True))).to(x.dtype).contiguous()


def _compute_gated(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    _check_match(gate=gate, up=up)
    return (activation(gate) * up).contiguous()


def _compute_gated_backward(
    activation: Callable[[Tensor], Tensor], activation_backward: Callable[[Tensor, Tensor], Tensor], *tensors: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up. The activation is rounded before it is multiplied by `grad`."""
    (grad, gate, up), dtype = map(_upcast, tensors), tensors[1].dtype
    rounded = _upcast(activation(gate).to(dtype))
    return activation_backward(grad * up, gate).to(dtype).contiguous(), (grad * rounded).to(dtype).contiguous()


def _apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Apply `rope` or its transpose, which is the inverse rotation if the halves of `cos` and of `sin` are equal."""
    _check_rope(q, k, cos, sin)
    R, half = cos.shape[-1], cos.shape[-1] // 2
    wide_cos, wide_sin = _upcast(cos)[:, None], _upcast(sin)[:, None]
    if transposed:
        wide_sin = -torch.cat([wide_sin[..., half:], wide_sin[..., :half]], dim=-1)
    results = []
    for x in (q, k):
        x_rotary = _upcast(x[..., :R])
        swapped = torch.cat([-x_rotary[..., half:], x_rotary[..., :half]], dim=-1)
        out = _allocate_heads(x)
        out[..., :R] = (x_rotary * wide_cos + swapped * wide_sin).to(x.dtype)
        out[..., R:] = x[..., R:]
        results.append(out)
    return results[0], results[1]


def _allocate_heads(x: Tensor) -> Tensor:
    """Allocate a tensor [B, H, T, D] stored as [B, T, H, D]."""
    B, H, T, D = x.shape
    return x.new_empty(B, T, H, D).transpose(1, 2)


def _check_norm(x: Tensor, weight: Tensor) -> None:
    if weight.dim() != 1 or x.dim() < 1 or weight.shape[0] != x.shape[-1]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, x {tuple(x.shape)}: expected [D] and [..., D]")
    _check_match(same_shape=False, x=x, weight=weight)


def _check_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    _check_match(same_shape=False, q=q, k=k, cos=cos, sin=sin)
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}"
    if q.dim() != 4 or k.dim() != 4 or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise ValueError(f"{shapes}: expected q and k as [B, heads, T, D] with equal B, T and D")
    if cos.dim() != 3 or cos.shape != sin.shape or cos.shape[1] != q.shape[2] or cos.shape[0] not in (1, q.shape[0]):
        raise ValueError(f"{shapes}: expected cos and sin as [B or 1, T, R]")
    if cos.shape[2] % 2 or q.shape[3] % 2 or cos.shape[2] > q.shape[3]:
        raise ValueError(f"{shapes}: rotary width and D must be even, and D at least the rotary width")


def _check_match(same_shape: bool = True, **tensors: Tensor) -> None:
    (name, first), *others = tensors.items()
    for other, tensor in others:
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise ValueError(
                f"{other} is {tensor.dtype} on {tensor.device}, {name} is {first.dtype} on {first.device}: "
                "convert one of them"
            )
        if same_shape and tensor.shape != first.shape:
            raise ValueError(f"{name} {tuple(first.shape)} and {other} {tuple(tensor.shape)}: expected the same shape")


def _fake_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    _check_norm(x, weight)
    rstd_dtype = x.dtype if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape), x.new_empty(x.numel() // x.shape[-1], dtype=rstd_dtype)


def _fake_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    _check_rope(q, k, cos, sin)
    return _allocate_heads(q), _allocate_heads(k)


def _fake_gated(gate: Tensor, up: Tensor) -> Tensor:
    _check_match(gate=gate, up=up)
    return gate.new_empty(gate.shape)


_NORM = define(
    "rms_norm_forward(Tensor x, Tensor weight, float eps, float offset) -> (Tensor y, Tensor rstd)",
    reference_rms_norm_forward, _fake_norm,
)  # fmt: skip
define(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor rstd, float offset) -> Tensor",
    reference_rms_norm_backward, lambda grad, x, weight, rstd, offset: x.new_empty(x.shape),
)  # fmt: skip
for _name, _activation, _derive in (
    ("silu_mul", torch.nn.functional.silu, torch.ops.aten.silu_backward),
    (
        "gelu_mul",
        partial(torch.nn.functional.gelu, approximate="tanh"),
        partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    ),
):
    define(f"{_name}(Tensor gate, Tensor up) -> Tensor", partial(_compute_gated, _activation), _fake_gated)
    define(
        f"{_name}_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor grad_gate, Tensor grad_up)",
        partial(_compute_gated_backward, _activation, _derive),
        lambda grad, gate, up: (gate.new_empty(gate.shape), gate.new_empty(gate.shape)),
    )  # fmt: skip
_SILU_MUL, _GELU_MUL = torch.ops.zerolora.silu_mul.default, torch.ops.zerolora.gelu_mul.default
_ROPE = define(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor q_out, Tensor k_out)",
    partial(_apply_rope, transposed=False), _fake_rope,
)  # fmt: skip
define(
    "rope_backward(Tensor grad_q, Tensor grad_k, Tensor cos, Tensor sin) -> (Tensor out_q, Tensor out_k)",
    partial(_apply_rope, transposed=True), _fake_rope,
)  # fmt: skip


# Derivatives for devices other than CUDA; ops/csrc/elementwise/elementwise.cpp registers those for CUDA.
def _save_for_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, ctx.offset = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _norm_backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    if ctx.needs_input_grad[1]:
        raise ValueError("weight.requires_grad=True: the operator does not compute its gradient; freeze it")
    return torch.ops.zerolora.rms_norm_backward(grad, *ctx.saved_tensors, ctx.offset), None, None, None


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[-2:])  # gate and up, or cos and sin


def _register_backward(name: str) -> None:
    """Register zerolora::NAME_backward, which reads the last two inputs of NAME, as the gradient of zerolora::NAME."""
    backward = getattr(torch.ops.zerolora, f"{name}_backward")

    def derive(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grads_in = backward(*grads, *ctx.saved_tensors)
        return *grads_in, *[None] * (len(ctx.needs_input_grad) - len(grads_in))

    torch.library.register_autograd(f"zerolora::{name}", derive, setup_context=_save_inputs)


torch.library.register_autograd("zerolora::rms_norm_forward", _norm_backward, setup_context=_save_for_norm)
for _name in ("silu_mul", "gelu_mul", "rope"):
    _register_backward(_name)
for _name in ("rms_norm_backward", "silu_mul_backward", "gelu_mul_backward", "rope_backward"):
    torch.library.register_autograd(f"zerolora::{_name}", reject_second_derivative)
