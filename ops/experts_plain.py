"""MoE operator in plain torch, expert by expert: the reference for the kernels and the CPU implementation.

Symbols and formulas: ops/experts.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ops import reference


def build_dense_weight(tensors: Sequence[Tensor], storage: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the weight [E, rows, cols] of an `ExpertMatrix`. `shape` is (E, rows, cols, block, nested_block)."""
    E, rows, cols, block, nested_block = shape
    if storage == "mxfp4":
        weight = reference.dequantize_mxfp4(tensors[0], tensors[1], dtype)
    elif storage == "eight_bit":
        values, scales = tensors
        weight = reference.dequantize_blocks(values, scales, (block, nested_block) if block else (1, cols), dtype)
    elif storage in ("int4", "fp4"):
        weight = reference.dequantize_groups(tensors, storage == "fp4", cols // tensors[1].shape[-1], dtype)
    elif storage == "nf4":
        packed, absmax, code, *nested = tensors
        check_packed(packed, E, rows, cols)
        codes = packed.reshape(-1).view(torch.uint8)[: E * rows * cols // 2].view(E, -1)
        states = [[absmax[e], code] + ([nested[0][e], nested[1], nested[2][e]] if nested else []) for e in range(E)]
        weight = torch.stack(
            [reference.dequantize_nf4(codes[e], states[e], rows, cols, block, nested_block, dtype) for e in range(E)]
        )
    else:
        weight = tensors[0].transpose(1, 2) if storage == "transposed" else tensors[0]
        if weight.dtype != dtype:
            raise ValueError(f"experts are {weight.dtype}, hidden is {dtype}: convert one of them")
    if tuple(weight.shape) != (E, rows, cols):
        raise ValueError(
            f"experts are {tuple(weight.shape)}, not [{E}, {rows}, {cols}]; with ZeRO-3, gather the parameter first"
        )
    return weight


def check_packed(packed: Tensor, E: int, rows: int, cols: int) -> None:
    """Raise ValueError unless `packed` has enough bytes for all experts."""
    size = packed.numel() * packed.element_size()
    if size * 2 < E * rows * cols:
        raise ValueError(
            f"packed experts have {size} bytes, but [{E}, {rows}, {cols}] needs {E * rows * cols // 2};"
            " with ZeRO-3, gather the parameter first"
        )


def sort_rows(index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return order[N], the pairs t K + k sorted by expert, then by pair, and ends[E], the end of each expert's rows.

    Pairs without an expert (an index below 0, or E and above) come last, after ends[E - 1].
    """
    flat = index.reshape(-1)
    flat = torch.where((flat < 0) | (flat >= experts), experts, flat)
    order = torch.argsort(flat, stable=True).to(torch.int32)
    counts = torch.bincount(flat, minlength=experts + 1)[:experts]
    return order, counts.cumsum(0).to(torch.int32)


class _Rows:
    def __init__(self, e: int, begin: int, end: int, pairs: Tensor, K: int) -> None:
        self.e, self.span, self.pairs, self.tokens = e, slice(begin, end), pairs, pairs // K


def _split_rows_by_expert(order: Tensor, ends: Tensor, K: int) -> list[_Rows]:
    """Return the rows of each expert that has at least one; copies the counts to the host."""
    rows, begin = [], 0
    for e, end in enumerate(ends.tolist()):
        if end > begin:
            rows.append(_Rows(e, begin, end, order[begin:end].long(), K))
        begin = end
    return rows


def _draw_masks(N: int, shape: Sequence[int], p: float, seed: Tensor | None, dtype: torch.dtype) -> list[Tensor | None]:
    if p == 0.0 or seed is None:
        return [None, None]
    return [reference.build_dropout_mask(seed[i : i + 1], N, shape[2 - i], p, dtype) for i in range(2)]


def _apply_mask(x: Tensor, mask: Tensor | None, rows: _Rows) -> Tensor:
    return x if mask is None else x * mask[rows.pairs]


def count_h_columns(factors: Sequence[Tensor]) -> int:
    """Return the number of columns of h: the rank rounded up to a multiple of 16, as in the kernels."""
    return (factors[0].shape[1] + 15) // 16 * 16 if factors else 0


def forward(  # type: ignore[no-untyped-def]
    x, index, weights, gate_up, down, biases, gate_up_factors, down_factors, shape, modes, scalars, seed
) -> tuple[Tensor, ...]:
    """Return y of `experts_forward` in plain torch, and u0, h_gu, h_d, order, ends for the backward."""
    (E, inner, H, *blocks), (s_gu, s_d, p, alpha, limit) = shape, scalars
    K, N = index.shape[1], index.numel()
    gate_up = build_dense_weight(gate_up, modes[0], (E, 2 * inner, H, *blocks), x.dtype)
    down = build_dense_weight(down, modes[1], (E, H, inner, *blocks), x.dtype)
    order, ends = sort_rows(index, E)
    u0 = x.new_zeros((N, 2 * inner))
    h_gu, h_d = (x.new_zeros((N, count_h_columns(factors))) for factors in (gate_up_factors, down_factors))
    masks = _draw_masks(N, shape, p, seed, x.dtype)
    out = x.new_zeros((N, H))  # in the order of the pairs
    for rows in _split_rows_by_expert(order, ends, K):
        x_e = x[rows.tokens]
        u0[rows.span] = x_e @ gate_up[rows.e].t()
        if gate_up_factors:
            a_RH = gate_up_factors[0][rows.e].to(x.dtype)
            h_gu[rows.span, : a_RH.shape[0]] = s_gu * (_apply_mask(x_e, masks[0], rows) @ a_RH.t())
        gate, up = _compute_gate_and_up(u0, h_gu, biases, gate_up_factors, rows, modes)
        act = reference.activate(gate, up, modes[2], alpha, limit)
        o = act @ down[rows.e].t()
        if down_factors:
            a_RI, b_HR = (factor[rows.e].to(x.dtype) for factor in down_factors)
            h = s_d * (_apply_mask(act, masks[1], rows) @ a_RI.t())
            h_d[rows.span, : a_RI.shape[0]] = h
            o = o + h @ b_HR.t()
        out[rows.pairs] = o + biases[1][rows.e] if biases else o
    y = (out * weights.reshape(-1, 1).to(x.dtype)).view(-1, K, H).sum(1)
    return y, u0, h_gu, h_d, order, ends


def _compute_gate_and_up(u0, h_gu, biases, gate_up_factors, rows, modes):  # type: ignore[no-untyped-def]
    u = u0[rows.span]
    if biases:
        u = u + biases[0][rows.e].to(u.dtype)
    if gate_up_factors:
        b_UR = gate_up_factors[1][rows.e].to(u.dtype)
        u = u + h_gu[rows.span, : b_UR.shape[1]] @ b_UR.t()
    return (u[..., ::2], u[..., 1::2]) if modes[3] == "interleaved" else u.chunk(2, dim=-1)


def backward(  # type: ignore[no-untyped-def]
    grad, x, weights, gate_up, down, biases, gate_up_factors, down_factors, u0, h_gu, h_d, order, ends, shape, modes,
    scalars, seed, need_x, need_weights, need_factors
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
    """Compute `experts_backward` in plain torch; gradients that are not needed are empty."""
    (E, inner, H, *blocks), (s_gu, s_d, p, alpha, limit) = shape, scalars
    K, N = weights.shape[1], weights.numel()
    gate_up = build_dense_weight(gate_up, modes[0], (E, 2 * inner, H, *blocks), x.dtype)
    down = build_dense_weight(down, modes[1], (E, H, inner, *blocks), x.dtype)
    masks = _draw_masks(N, shape, p, seed, x.dtype)
    flat = weights.reshape(-1).to(x.dtype)
    grad_flat = torch.zeros_like(flat)
    grad_rows = x.new_zeros((N, H))  # in the order of the pairs
    grads_gu, grads_d = ([torch.zeros_like(f) for f in pair] for pair in (gate_up_factors, down_factors))
    for rows in _split_rows_by_expert(order, ends, K):
        dy, w = grad[rows.tokens], flat[rows.pairs, None]
        gate, up = _compute_gate_and_up(u0, h_gu, biases, gate_up_factors, rows, modes)
        act = reference.activate(gate, up, modes[2], alpha, limit)
        g = dy @ down[rows.e]
        if down_factors:
            a_RI, b_HR = (factor[rows.e].to(x.dtype) for factor in down_factors)
            dh = s_d * (dy @ b_HR)
            grads_d[0][rows.e] = (w * dh).t() @ _apply_mask(act, masks[1], rows)
            grads_d[1][rows.e] = dy.t() @ (w * h_d[rows.span, : a_RI.shape[0]])
            g = g + _apply_mask(dh @ a_RI, masks[1], rows)
        grad_flat[rows.pairs] = (act * g).sum(1)
        if biases:
            grad_flat[rows.pairs] += (dy * biases[1][rows.e].to(x.dtype)).sum(1)
        grads = reference.activate_backward(w * g, gate, up, modes[2], alpha, limit)
        du = torch.stack(grads, dim=-1).flatten(-2) if modes[3] == "interleaved" else torch.cat(grads, dim=-1)
        dx = du @ gate_up[rows.e]
        if gate_up_factors:
            a_RH, b_UR = (factor[rows.e].to(x.dtype) for factor in gate_up_factors)
            dh = s_gu * (du @ b_UR)
            grads_gu[0][rows.e] = dh.t() @ _apply_mask(x[rows.tokens], masks[0], rows)
            grads_gu[1][rows.e] = du.t() @ h_gu[rows.span, : a_RH.shape[0]]
            dx = dx + _apply_mask(dh @ a_RH, masks[0], rows)
        grad_rows[rows.pairs] = dx
    grad_x = grad_rows.view(-1, K, H).sum(1) if need_x else x.new_empty(0)
    grad_weights = grad_flat.view(weights.shape).to(weights.dtype) if need_weights else weights.new_empty(0)
    return grad_x, grad_weights, grads_gu if need_factors else [], grads_d if need_factors else []
