"""LoRA's arithmetic in plain torch, for any device and type: the reference for the kernels.

Legend: T tokens (leading dimensions flattened), I in, O out, R rank; x[T,I], W[O,I] frozen, A[R,I] down, B[O,R] up,
s = alpha / r (or alpha / sqrt(r)), m = keep / (1 - p) the dropout mask (1 where p = 0).

    forward   h = s (m*x) A^T          y = x W^T + bias + h B^T
    backward  dh = s dY B              dB = dY^T h
              dA = dh^T (m*x)          dX = dY W + m*(dh A)

h and dh contain s, so that it is applied once, in the fp32 sum, and not again in any matmul.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

PHILOX_ROUNDS = 7  # the fewest rounds that pass BigCrush (Salmon et al., SC 2011, table 2); the kernels use the same
_MASK_32 = 0xFFFFFFFF


def _draw_philox(key: int, counter: Tensor) -> list[Tensor]:
    """Compute Philox4x32 for 64-bit counters; return four tensors of 32-bit numbers in int64."""
    c0, c1 = counter & _MASK_32, (counter >> 32) & _MASK_32
    c2, c3 = torch.zeros_like(counter), torch.zeros_like(counter)
    k0, k1 = key & _MASK_32, (key >> 32) & _MASK_32
    for _ in range(PHILOX_ROUNDS):
        # A 64-bit product wraps in int64, but its bits equal the unsigned product's.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((product1 >> 32) & _MASK_32) ^ c1 ^ k0, product1 & _MASK_32
        c2, c3 = ((product0 >> 32) & _MASK_32) ^ c3 ^ k1, product0 & _MASK_32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK_32, (k1 + 0xBB67AE85) & _MASK_32
    return [c0, c1, c2, c3]


def build_dropout_mask(seed: Tensor, rows: int, width: int, p: float, dtype: torch.dtype) -> Tensor:
    """Return the mask m[rows, width] = keep / (1 - p), bitwise equal to the kernels' mask for this seed.

    `seed` is an int64 tensor. One Philox call yields 15-bit numbers for 8 adjacent elements of a row. An
    element is dropped if its number is below round(32768 p).
    """
    groups = (width + 7) // 8
    counter = torch.arange(rows * groups, device=seed.device, dtype=torch.int64)
    words = torch.stack(_draw_philox(int(seed.item()), counter), dim=-1)
    numbers = torch.stack([words & 0x7FFF, (words >> 16) & 0x7FFF], dim=-1).reshape(rows, groups * 8)[:, :width]
    threshold = min(int(p * 32768 + 0.5), 32767)
    return (numbers >= threshold).to(dtype) / (1.0 - p)


def unpack_mask(bits: Tensor, width: int) -> Tensor:
    """Unpack the kernels' mask bits, int32 [ceil(width/128), T, 4], to a bool keep[T, width].

    Element 128b + 32q + 8c + 2j + e of a row is bit 16e + 4q + j of word c in block b.
    """
    words = bits.permute(1, 0, 2)[:, :, None, :, None, None]
    return (words >> _build_bit_shifts(bits.device) & 1).bool().reshape(bits.shape[1], -1)[:, :width]


def _build_bit_shifts(device: torch.device) -> Tensor:
    q, j, e = torch.arange(4, device=device), torch.arange(4, device=device), torch.arange(2, device=device)
    return 4 * q.view(4, 1, 1, 1) + j.view(4, 1) + 16 * e


def compute_h(x: Tensor, down: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Return h[T,R] = s (m*x) A^T."""
    return scale * ((x if mask is None else x * mask) @ down.t())


def backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor | None,
    down: Tensor,
    up: Tensor,
    h: Tensor,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dX[T,I], dA[R,I], dB[O,R]; without a weight, dX is only the adapter's part."""
    grad_h_TR = scale * (grad_y @ up)
    grad_up_OR = grad_y.t() @ h
    grad_down_RI = grad_h_TR.t() @ (x if mask is None else x * mask)
    grad_x_TI = grad_h_TR @ down
    if mask is not None:
        grad_x_TI = grad_x_TI * mask
    if weight is not None:
        grad_x_TI = grad_x_TI + grad_y @ weight
    return grad_x_TI, grad_down_RI, grad_up_OR


def dequantize_nf4(
    packed: Tensor, state: Sequence[Tensor], rows: int, cols: int, block: int, nested_block: int, dtype: torch.dtype
) -> Tensor:
    """Return W[rows, cols] of a bitsandbytes NF4 weight, code[q] * absmax[i / block]; two values per byte, high first.

    `state` is [absmax, code], or with double quantization [uint8 absmax, code, nested absmax, nested code, offset] and
    absmax[b] = nested_code[absmax[b]] * nested_absmax[b / nested_block] + offset (Dettmers et al. 2023, section 3).
    """
    size = packed.numel() * packed.element_size()
    if size * 2 < rows * cols:
        raise ValueError(
            f"packed weight has {size} bytes, but [{rows}, {cols}] needs {(rows * cols + 1) // 2};"
            " with ZeRO-3, gather the parameter first"
        )
    absmax, code = state[0], state[1]
    if len(state) == 5:
        _, _, nested_absmax, nested_code, offset = state
        block_index = torch.arange(absmax.numel(), device=absmax.device) // nested_block
        absmax = nested_code[absmax.long()] * nested_absmax[block_index] + offset
    bytes_ = packed.reshape(-1).view(torch.uint8)
    values = code[torch.stack([bytes_ >> 4, bytes_ & 15], dim=-1).reshape(-1).long()][: rows * cols]
    block_index = torch.arange(rows * cols, device=values.device) // block
    return (values * absmax[block_index]).to(dtype).reshape(rows, cols)


FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1 magnitudes, indexed by the three low bits of a code."""
ELEMENTS_AT_ONCE = 1 << 22
"""Number of values that `dequantize_groups` computes in fp32 at once, at 16 bytes each."""


def dequantize_groups(groups: Sequence[Tensor], is_float: int, group: int, dtype: torch.dtype) -> Tensor:
    """Return W[..., O, I] from 4-bit codes with one scale per `group` columns of a row, rounded to `dtype` once.

    `groups` is codes[..., O, I/2], two per byte, low bits first, scales[..., O, G], zeros[..., O, G] (or empty: 8),
    divisors[..., O, 1] of the scales and order[..., I], the group of each column (both may be empty):

        W = scale (code - zero)             unsigned integers (GPTQ, AWQ, W4A16 of compressed-tensors)
        W = (scale / divisor) E2M1(code)    with `is_float` (NVFP4)
    """
    *matrices, rows, half = groups[0].shape
    out = torch.empty((math.prod(matrices), rows, 2 * half), dtype=dtype, device=groups[0].device)
    height = max(1, ELEMENTS_AT_ONCE // (2 * half))
    for index, matrix in enumerate(out):
        *parts, order = (part.reshape(len(out), *part.shape[len(matrices) :])[index] for part in groups)
        columns = order if order.numel() else torch.arange(2 * half, device=out.device) // group
        for begin in range(0, rows, height):
            span = slice(begin, begin + height)
            matrix[span] = _dequantize_rows([part[span] for part in parts], columns, is_float)
    return out.view(*matrices, rows, 2 * half)


def _dequantize_rows(parts: Sequence[Tensor], columns: Tensor, is_float: int) -> Tensor:
    codes, scales, zeros, divisors = parts
    values = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    wide = scales.float() / divisors if divisors.numel() else scales.float()
    if is_float:
        codebook = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], device=codes.device)
        return codebook[values.int()] * wide[:, columns]
    return (values.float() - (zeros[:, columns].float() if zeros.numel() else 8.0)) * wide[:, columns]


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return W[..., O, I] from MXFP4 blocks[..., O, I/32, 16] and scales[..., O, I/32], uint8: value 2^(scale - 127).

    Two E2M1 values per byte, the low nibble first (OCP Microscaling Formats 1.0, section 5.3).
    """
    values = torch.tensor(FP4_VALUES, device=blocks.device)
    codebook = torch.cat([values, -values])
    nibbles = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()
    wide = torch.ldexp(codebook[nibbles], (scales.to(torch.int32) - 127)[..., None])
    return wide.flatten(-2).to(dtype)


SMALLEST_SCALE = 2.0**-100
"""Lower bound of a row's scale: rows of zeros stay zeros, and the inverse stays finite."""


def quantize_rows(values: Tensor, storage: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (q[N,K], scale[N]) with values ~ scale q: the largest magnitude of a row becomes 448 (e4m3) or 127 (int8).

    `storage` is uint8 for e4m3. Both formats round to nearest, ties to even. A row with a NaN or an infinity gives NaN
    in every matmul.
    """
    wide = values.float()
    largest = wide.abs().amax(1) if wide.shape[1] else wide.new_zeros(wide.shape[0])
    # Divide by a tensor: GPUs multiply by the inverse of a Python number, which rounds differently.
    top = torch.full_like(largest, 448.0 if storage == torch.uint8 else 127.0)
    scale = (largest / top).clamp(min=SMALLEST_SCALE)
    scaled = wide * (1.0 / scale)[:, None]
    if storage == torch.uint8:
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scale
    return scaled.nan_to_num(nan=0.0).round().clamp(-127, 127).to(torch.int8), scale


def decode_8bit_values(q: Tensor) -> Tensor:
    """Convert 8-bit values to float32; uint8 stores e4m3."""
    return (q.view(torch.float8_e4m3fn) if q.dtype == torch.uint8 else q).float()


def compute_8bit_product(q: Tensor, scale: Tensor, right: Tensor, column_scale: Tensor | None) -> Tensor:
    """Return Y[T,N] = scale (q[T,K] right[K,N]) column_scale in float32; scale[T], column_scale[N]."""
    y = (decode_8bit_values(q) @ decode_8bit_values(right)) * scale[:, None]
    return y if column_scale is None else y * column_scale


def dequantize_blocks(
    q: Tensor, scales: Tensor, block: Sequence[int], dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Return W[..., O, I] = scale q with one scale per block of `block` = (rows, columns), rounded to `dtype` once.

    q[..., O, I] is uint8 (e4m3) or int8, scales[..., ceil(O/rows), ceil(I/columns)] float32; the last block of a row or
    column may be short (DeepSeek-AI 2024, DeepSeek-V3, section 3.3). The result is written to `out` if given.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=dtype, device=q.device)
    out.copy_(q.view(torch.float8_e4m3fn) if q.dtype == torch.uint8 else q)
    for rows, scale_rows, height in _split_into_spans(q.shape[-2], block[0]):
        for cols, scale_cols, width in _split_into_spans(q.shape[-1], block[1]):
            blocks = out[..., rows, cols].unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
            blocks.mul_(scales[..., scale_rows, None, scale_cols, None])  # computed in fp32, like the scales
    return out


def _split_into_spans(size: int, block: int) -> list[tuple[slice, slice, int]]:
    """Return (elements, scales, block length) for the full blocks and, if there is one, the short last block."""
    full = size // block
    spans = [
        (slice(0, full * block), slice(0, full), block),
        (slice(full * block, size), slice(full, None), size % block),
    ]
    return [span for span in spans if span[0].stop > span[0].start]


def activate(gate: Tensor, up: Tensor, kind: str, alpha: float, limit: float) -> Tensor:
    """Compute f(gate) up with f = silu or gelu, or gpt-oss's (up + 1) gate sigmoid(alpha gate) with clamped inputs."""
    if kind == "clamped":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(alpha * gate)
    if kind == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none") * up


def activate_backward(
    grad: Tensor, gate: Tensor, up: Tensor, kind: str, alpha: float, limit: float
) -> tuple[Tensor, Tensor]:
    if kind == "clamped":
        inside, v, u = gate <= limit, gate.clamp(max=limit), up.clamp(-limit, limit)
        s = torch.sigmoid(alpha * v)
        return grad * (u + 1) * s * (1 + alpha * v * (1 - s)) * inside, grad * v * s * (up.abs() <= limit)
    if kind == "silu":
        return torch.ops.aten.silu_backward(grad * up, gate), grad * torch.nn.functional.silu(gate)
    approximate = "tanh" if kind == "gelu_tanh" else "none"
    grad_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate=approximate)
    return grad_gate, grad * torch.nn.functional.gelu(gate, approximate=approximate)
