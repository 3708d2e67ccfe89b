"""The passes of the LoRA kernels as separate operators, and the backward pass of one adapter without its frozen weight.

Legend: T tokens (leading dimensions), I in, O out, R rank; the backward recomputes h = s x A^T.
"""

import math

import torch
from torch import Tensor

from ops import lora, reference
from ops.derivative import define


def reference_adapter_backward_(
    grad: Tensor,
    x: Tensor,
    down: Tensor,
    up: Tensor,
    scale: float,
    grad_x: Tensor,
    grad_down: Tensor,
    grad_up: Tensor,
    accumulate: bool,
) -> None:
    """Write one adapter's gradients to `grad_*` in plain torch, or add them to `grad_*` if `accumulate` is set."""
    grad_TO, x_TI = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    down_RI, up_OR = down.to(x.dtype), up.to(x.dtype)
    h_TR = scale * (x_TI @ down_RI.t())
    results = reference.backward(grad_TO, x_TI, None, down_RI, up_OR, h_TR, scale)
    for target, result in zip((grad_x, grad_down, grad_up), results, strict=True):
        if accumulate:
            target.add_(result.view(target.shape))
        else:
            target.copy_(result.view(target.shape))


def reference_rank_pass(
    z: Tensor, p: Tensor | None, v: Tensor | None, dropout: float, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute one rank pass in plain torch: u, and g if v[T,R] is given, for z[T,D] and a dropout mask m.

    - without v: u = (m*z) p^T with p[R,D], g empty
    - with v: u = (m*z) p with p[D,R], g = (m*z)^T v [D,R]
    - v without p: u empty, g = v^T (m*z) [R,D]
    """
    mask = lora.draw_mask(z, dropout, seed)
    masked = z if mask is None else z * mask
    u = z.new_empty((0, v.shape[1] if v is not None else 0)) if p is None else masked @ (p.t() if v is None else p)
    if v is None:
        return u, z.new_empty((0, z.shape[1]))
    return u, (v.t() @ masked if p is None else masked.t() @ v)


def reference_rank_expand(h: Tensor, q: Tensor, dropout: float, seed: Tensor | None) -> Tensor:
    """Return y[T,D] = keep * (h[T,R] q^T) for q[D,R]: dropped elements are 0; h must contain the factor 1/(1-p)."""
    y = h @ q.t()
    mask = lora.draw_mask(y, dropout, seed)
    return y if mask is None else y * (mask != 0)


def reference_frozen_product(
    x: list[Tensor],
    w: list[Tensor],
    h: Tensor,
    q: Tensor,
    bias: Tensor | None,
    bits: Tensor | None,
    forced: bool = True,
) -> Tensor:
    """Return y[T,D] = keep * (h[T,R] q^T) + sum of x[T,K] w^T + bias[D] for q[D,R], w[D,K].

    On GPUs, `forced` selects our kernel; otherwise the implementation is chosen as in the operators.
    """
    y = h @ q.t()
    if bits is not None:
        y = y * reference.unpack_mask(bits, y.shape[1])
    for x_TK, w_DK in zip(x, w, strict=True):
        y = y + x_TK @ w_DK.t()
    return y if bias is None else y + bias


define(
    "adapter_backward_(Tensor grad, Tensor x, Tensor down, Tensor up, float scale, Tensor(a!) grad_x,"
    " Tensor(b!) grad_down, Tensor(c!) grad_up, bool accumulate) -> ()",
    reference_adapter_backward_,
)
define(
    "rank_pass(Tensor z, Tensor? p, Tensor? v, float dropout, Tensor? seed) -> (Tensor u, Tensor g)",
    reference_rank_pass,
)
define("rank_expand(Tensor h, Tensor q, float dropout, Tensor? seed) -> Tensor", reference_rank_expand)
define(
    "frozen_product(Tensor[] x, Tensor[] w, Tensor h, Tensor q, Tensor? bias, Tensor? bits, bool forced=True)"
    " -> Tensor",
    reference_frozen_product,
)


def lora_backward(
    grad_output: Tensor, x: Tensor, lora_down: Tensor, lora_up: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of y = s x A^T B^T: dX = s dY B A, dA = s (dY B)^T x, dB = s dY^T (x A^T).

    grad_output[..., O], x[..., I] with the same leading dimensions, lora_down A[R, I], lora_up B[O, R]; a gradient has
    the same shape as its tensor.
    Raises ValueError for mismatched shapes, types or devices, and for an unsupported rank or scale.
    """
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale}: must be a finite number")
    same_tokens = grad_output.shape[:-1] == x.shape[:-1] and grad_output.dim() > 1
    if not same_tokens or grad_output.dtype != x.dtype or grad_output.device != x.device:
        raise ValueError(
            f"grad_output {tuple(grad_output.shape)} {grad_output.dtype} on {grad_output.device} for x"
            f" {tuple(x.shape)} {x.dtype} on {x.device}: types, devices and leading dimensions must match"
        )
    lora.check_adapters(x, [grad_output.shape[-1]], [lora_down], [lora_up], [scale], 0.0)
    grad_x, grad_down, grad_up = (tensor.new_empty(tensor.shape) for tensor in (x, lora_down, lora_up))
    torch.ops.zerolora.adapter_backward_(grad_output, x, lora_down, lora_up, scale, grad_x, grad_down, grad_up, False)
    return grad_x, grad_down, grad_up
