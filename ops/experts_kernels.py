"""MoE operator on CUDA GPUs: our kernels around torch's grouped matmul.

Symbols and formulas: ops/experts.py. Calls do not synchronize with the device for bf16 on compute capability 9.0 and
10.0 (torch's grouped matmul has a kernel) and fp16 on 9.0 (only our kernel is used). Otherwise torch multiplies expert
by expert and reads the counts from the device. The plain-torch code for fp32, for widths that are not multiples of 8,
and for GPUs older than Ampere does the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ops import experts_plain

MAX_EXPERTS = 1024
MAX_FUSED_RANK = 32
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "clamped")
_ROWS = "Tensor order, Tensor ends, Tensor tiles"
_DROPOUT = "float dropout, Tensor? seed"
_GATE = (
    f"Tensor u0, Tensor h, Tensor? b, Tensor? bias, {{}}{_ROWS}, int kind, bool interleaved, float alpha, float limit"
)
for _schema in (
    "expert_sort(Tensor index, int experts) -> (Tensor order, Tensor ends)",
    "expert_plan(Tensor order, Tensor ends) -> (Tensor place, Tensor tiles, Tensor pairs)",
    "expert_product(Tensor x, Tensor w, Tensor? h, Tensor? q, Tensor ends, Tensor pairs, bool forward) -> Tensor",
    f"expert_project(Tensor z, {_ROWS}, int per_source, Tensor? p, float scale, bool copy, {_DROPOUT})"
    " -> (Tensor u, Tensor copied)",
    f"expert_gradient(Tensor z, Tensor v, {_ROWS}, int per_source, int rank, bool transposed, ScalarType dtype,"
    f" {_DROPOUT}) -> Tensor",
    f"expert_expand_(Tensor(a!) y, Tensor? h, Tensor? q, Tensor? bias, {_ROWS}, {_DROPOUT}) -> ()",
    "expert_combine(Tensor rows, Tensor place, Tensor ends, Tensor? w, int per_token) -> Tensor",
    f"expert_gate({_GATE.format('')}, Tensor? p, float scale, {_DROPOUT}) -> (Tensor act, Tensor projected)",
    f"expert_gate_backward(Tensor g, {_GATE.format('Tensor? dh, Tensor? a, Tensor w, ')}, Tensor? p, float scale,"
    f" {_DROPOUT}) -> (Tensor act, Tensor du, Tensor dw, Tensor projected)",
    "expert_nf4(Tensor packed, Tensor[] state, int experts, int rows, int cols, int block, int nested_block,"
    " ScalarType dtype) -> Tensor",
    "expert_mxfp4(Tensor blocks, Tensor scales, ScalarType dtype) -> Tensor",
):
    torch.library.define(f"zerolora::{_schema.partition('(')[0]}", "(" + _schema.partition("(")[2])
_ops: Any = torch.ops.zerolora
USE_PRODUCT_KERNEL = True
"""Whether Hopper GPUs use our matmul kernel for experts with an adapter; without one, torch's is as fast."""
_grouped: Callable[..., Tensor] = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm


def is_supported(x: Tensor, shape: Sequence[int]) -> bool:
    E, inner, H, block, _ = shape
    wide = x.dtype in (torch.bfloat16, torch.float16) and inner % 8 == 0 and H % 8 == 0 and block % 8 == 0
    return wide and 1 <= E <= MAX_EXPERTS and torch.cuda.get_device_capability(x.device) >= (8, 0)


def build_dense_weight(tensors: Sequence[Tensor], storage: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the weight as [E, rows, cols], dequantized if necessary."""
    E, rows, cols, block, nested_block = shape
    if storage == "nf4":
        experts_plain.check_packed(tensors[0], E, rows, cols)
        return _ops.expert_nf4(tensors[0], tensors[1:], E, rows, cols, block, nested_block, dtype)
    if storage == "mxfp4":
        return _ops.expert_mxfp4(tensors[0], tensors[1], dtype)
    return experts_plain.build_dense_weight(tensors, storage, shape, dtype)


def _pad_factors(factors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Return A[E,R,D] and B[E,O,R] in `dtype`, with R padded with zeros to a multiple of 16."""
    if not factors:
        return None, None
    down, up = (factor.to(dtype) for factor in factors)
    padding = -down.shape[1] % 16
    if padding:
        down, up = torch.nn.functional.pad(down, (0, 0, 0, padding)), torch.nn.functional.pad(up, (0, padding))
    return down.contiguous(), up.contiguous()


def _swap_dims(factor: Tensor | None) -> Tensor | None:
    """Swap the last two dims of a factor, [E,R,D] or [E,D,R], and make it contiguous, as the kernels require."""
    return None if factor is None else factor.transpose(1, 2).contiguous()


def _select_fusable(p: Tensor | None) -> Tensor | None:
    """Return p if its rank is small enough to fuse the projection into the previous kernel; None otherwise."""
    return p if p is not None and p.shape[1] <= MAX_FUSED_RANK else None


class _ExpertsCall:
    def __init__(  # type: ignore[no-untyped-def]
        self, x, biases, gate_up_factors, down_factors, shape, modes, scalars, seed, order, ends
    ) -> None:
        self.E, self.inner, self.H, *self.blocks = shape
        self.s_gu, self.s_d, self.p, alpha, limit = scalars
        self.seeds = (None, None) if self.p == 0.0 else (seed[:1], seed[1:])
        self.modes, self.dtype = modes, x.dtype
        self.a_gu, self.b_gu = _pad_factors(gate_up_factors, x.dtype)
        self.a_d, self.b_d = _pad_factors(down_factors, x.dtype)
        self.bias_gu: Tensor | None = biases[0].to(x.dtype).contiguous() if biases else None
        self.bias_d: Tensor | None = biases[1].to(x.dtype).contiguous() if biases else None
        self.place, tiles, self.pairs = _ops.expert_plan(order, ends)
        self.rows = order, ends, tiles
        self.ends, self.use_kernel = ends, USE_PRODUCT_KERNEL and torch.cuda.get_device_capability(x.device) == (9, 0)
        self.gate = _ACTIVATIONS.index(modes[2]), modes[3] == "interleaved", alpha, limit

    def build_gate_up(self, tensors: Sequence[Tensor]) -> Tensor:
        return build_dense_weight(tensors, self.modes[0], (self.E, 2 * self.inner, self.H, *self.blocks), self.dtype)

    def build_down(self, tensors: Sequence[Tensor]) -> Tensor:
        return build_dense_weight(tensors, self.modes[1], (self.E, self.H, self.inner, *self.blocks), self.dtype)

    def multiply(self, rows: Tensor, weight: Tensor, h: Tensor | None = None, q: Tensor | None = None) -> Tensor:
        """Return rows[N,K] weight[E,K,D] + h[N,R] q^T with the weight and q[E,D,R] of each row's expert."""
        by_column = weight.stride(1) == 1
        if self.use_kernel and (h is not None or rows.dtype != torch.bfloat16):
            w = weight.transpose(1, 2) if by_column else weight
            if q is not None:
                q = (q if by_column else q.transpose(1, 2)).contiguous()
            return _ops.expert_product(rows, w, h, q, self.ends, self.pairs, by_column)
        y = _grouped(rows, weight, offs=self.ends)
        if h is not None and q is not None:
            _ops.expert_expand_(y, h, q.contiguous(), None, *self.rows, 0.0, None)
        return y


def forward(  # type: ignore[no-untyped-def]
    x, index, weights, gate_up, down, biases, gate_up_factors, down_factors, shape, modes, scalars, seed, *_sources
) -> tuple[Tensor, ...]:
    """Compute `experts_forward`, in plain torch if the kernels do not support the inputs."""
    if not is_supported(x, shape) or index.numel() == 0:
        return experts_plain.forward(
            x, index, weights, gate_up, down, biases, gate_up_factors, down_factors, shape, modes, scalars, seed
        )
    K = index.shape[1]
    order, ends = _ops.expert_sort(index.contiguous(), shape[0])
    call = _ExpertsCall(x, biases, gate_up_factors, down_factors, shape, modes, scalars, seed, order, ends)
    h_gu, rows = _ops.expert_project(x.contiguous(), *call.rows, K, call.a_gu, call.s_gu, True, call.p, call.seeds[0])
    u0 = call.multiply(rows, call.build_gate_up(gate_up).transpose(1, 2))
    del rows
    p = _select_fusable(call.a_d)
    rank = p, call.s_d, call.p, call.seeds[1]
    act, h_d = _ops.expert_gate(u0, h_gu, call.b_gu, call.bias_gu, *call.rows, *call.gate, *rank)
    if call.a_d is not None and p is None:
        h_d, _ = _ops.expert_project(act, *call.rows, 0, call.a_d, call.s_d, False, call.p, call.seeds[1])
    out = call.multiply(act, call.build_down(down).transpose(1, 2), h_d if call.b_d is not None else None, call.b_d)
    del act
    if call.bias_d is not None:
        _ops.expert_expand_(out, None, None, call.bias_d, *call.rows, 0.0, None)
    y = _ops.expert_combine(out, call.place, ends, weights.float().contiguous().view(-1), K)
    return y, u0, h_gu, h_d, order, ends


def backward(  # type: ignore[no-untyped-def]
    grad, x, weights, gate_up, down, biases, gate_up_factors, down_factors, u0, h_gu, h_d, order, ends, shape, modes,
    scalars, seed, need_x, need_weights, need_factors
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
    if not is_supported(x, shape) or order.numel() == 0:
        return experts_plain.backward(
            grad, x, weights, gate_up, down, biases, gate_up_factors, down_factors, u0, h_gu, h_d, order, ends, shape,
            modes, scalars, seed, need_x, need_weights, need_factors
        )  # fmt: skip
    K, grad, x = weights.shape[1], grad.contiguous(), x.contiguous()
    call = _ExpertsCall(x, biases, gate_up_factors, down_factors, shape, modes, scalars, seed, order, ends)
    keep_scale = 1.0 / (1.0 - call.p)  # the mask's factor goes into dh, not into keep * (dh A) or the gradient of A
    flat = weights.float().contiguous().view(-1)
    w_rows = flat[order.long()][:, None].to(x.dtype) if down_factors and need_factors else None
    p_d = _swap_dims(call.b_d)
    dh_d, dy = _ops.expert_project(grad, *call.rows, K, p_d, call.s_d * keep_scale, True, 0.0, None)
    g = call.multiply(dy, call.build_down(down))
    grads_d: list[Tensor] = []
    if down_factors and need_factors:
        # Gradients per token need 1/K of the memory of gradients per row, and fit into the L2 cache.
        grad_b = _compute_factor_gradient(grad, w_rows * h_d, call, K, down_factors[1], True, None)
    del dy
    p_gu = _swap_dims(call.b_gu)
    act, du, dw, dh_gu = _ops.expert_gate_backward(
        g, u0, h_gu, call.b_gu, call.bias_gu, dh_d if p_d is not None else None, _swap_dims(call.a_d), flat, *call.rows,
        *call.gate, _select_fusable(p_gu), call.s_gu * keep_scale, call.p, call.seeds[1]
    )  # fmt: skip
    del g
    if down_factors and need_factors:
        grads_d = [_compute_factor_gradient(act, w_rows * dh_d, call, 0, down_factors[0], False, call.seeds[1]), grad_b]
    del act
    if call.bias_d is not None and need_weights:
        dw = dw + _compute_bias_term(grad, call.bias_d, order, ends, K)
    if p_gu is not None and _select_fusable(p_gu) is None:
        dh_gu, _ = _ops.expert_project(du, *call.rows, 0, p_gu, call.s_gu * keep_scale, False, 0.0, None)
    grads_gu: list[Tensor] = []
    if gate_up_factors and need_factors:
        grads_gu = [
            _compute_factor_gradient(x, dh_gu, call, K, gate_up_factors[0], False, call.seeds[0]),
            _compute_factor_gradient(du, h_gu, call, 0, gate_up_factors[1], True, None),
        ]
    grad_x = x.new_empty(0)
    if need_x:
        fuse = call.a_gu is not None and call.p == 0.0  # a dropout mask is applied between the two products
        q = call.a_gu.transpose(1, 2) if call.a_gu is not None and fuse else None
        dx = call.multiply(du, call.build_gate_up(gate_up), dh_gu if fuse else None, q)
        if call.a_gu is not None and not fuse:
            _ops.expert_expand_(dx, dh_gu, _swap_dims(call.a_gu), None, *call.rows, call.p, call.seeds[0])
        grad_x = _ops.expert_combine(dx, call.place, ends, None, K)
    grad_weights = dw.view(weights.shape).to(weights.dtype) if need_weights else weights.new_empty(0)
    return grad_x, grad_weights, grads_gu, grads_d


def _compute_factor_gradient(
    z: Tensor, v: Tensor, call: _ExpertsCall, per_source: int, factor: Tensor, transposed: bool, seed: Tensor | None
) -> Tensor:
    """Return the gradient of A[E,R,D] or, if `transposed`, of B[E,D,R], in the factor's dtype."""
    rank = factor.shape[2 if transposed else 1]
    p = call.p if seed is not None else 0.0
    return _ops.expert_gradient(z, v, *call.rows, per_source, rank, transposed, factor.dtype, p, seed)


def _compute_bias_term(grad: Tensor, bias: Tensor, order: Tensor, ends: Tensor, K: int) -> Tensor:
    """Return the dot product of each (token, expert) pair's output gradient and its expert's bias, fp32 [N].

    Computes the product for every token and expert, then selects the pairs.
    """
    row = torch.arange(order.numel(), device=order.device)
    expert = torch.searchsorted(ends.long(), row, right=True)  # len(ends) for pairs without an expert
    wide = torch.nn.functional.pad(grad.float() @ bias.float().t(), (0, 1))
    term = torch.empty_like(row, dtype=torch.float32)
    term[order.long()] = wide[order.long() // K, expert]
    return term
