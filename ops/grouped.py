"""LoRA operators for 4-bit base weights with a scale per group of columns: GPTQ, AWQ, W4A16 integers and NVFP4.

All parts of a weight are in one byte buffer, so that moving the Parameter moves the complete weight. Weights are
dequantized for each matmul, as in ops/scaled.py. The buffer itself is saved for the backward, so that ZeRO-3 can
free it and gather it again. Formulas: `reference.dequantize_groups`.
"""

from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ops import reference
from ops.scaled import build_dequantizing_group, frozen_linear

Sections = dict[str, tuple[tuple[int, ...], torch.dtype]]
SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
ALIGNMENT = 256


class GroupedLayout(NamedTuple):
    """Layout of one 4-bit matrix [rows, cols], or of `experts` such matrices, in a byte buffer.

    `group` columns share a scale of type SCALES[scale]. The other fields are flags (0 or 1):
    - `is_float`: codes are E2M1 numbers instead of unsigned integers.
    - `has_zeros`: each group has its own zero point; otherwise, all zero points are 8.
    - `has_divisors`: scales have a divisor per row.
    - `has_order`: the columns of a group are not adjacent (GPTQ's act-order).
    """

    experts: int
    rows: int
    cols: int
    group: int
    scale: int
    is_float: int
    has_zeros: int = 0
    has_divisors: int = 0
    has_order: int = 0

    def sections(self) -> Sections:
        """Return the shape and type of each part, in the order that `reference.dequantize_groups` expects."""
        matrices, groups = (self.experts,) if self.experts else (), -(-self.cols // self.group)
        return {
            "codes": ((*matrices, self.rows, self.cols // 2), torch.uint8),
            "scales": ((*matrices, self.rows, groups), SCALE_DTYPES[self.scale]),
            "zeros": ((*matrices, self.rows, groups * self.has_zeros), torch.uint8),
            "divisors": ((*matrices, self.rows, self.has_divisors), torch.float32),
            "order": ((*matrices, self.cols * self.has_order), torch.int32),
        }

    def dequantize(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values [rows, cols], or [experts, rows, cols]. Raises ValueError if `packed` is not gathered."""
        parts = list(view_sections(packed, self.sections()).values())
        return reference.dequantize_groups(parts, self.is_float, self.group, dtype)


def place_sections(sections: Sections) -> tuple[dict[str, int], int]:
    """Return the byte offset of each section, and the total size."""
    begins, end = {}, 0
    for name, (shape, dtype) in sections.items():
        begins[name] = end
        end = -(-(end + prod(shape) * dtype.itemsize) // ALIGNMENT) * ALIGNMENT
    return begins, end


def view_sections(packed: Tensor, sections: Sections) -> dict[str, Tensor]:
    """Return views of the sections of a byte buffer. Raises ValueError if the buffer is not gathered."""
    begins, size = place_sections(sections)
    if packed.numel() != size:
        raise ValueError(
            f"packed weight has {packed.numel()} bytes: expected {size}; with ZeRO-3, gather the parameter first"
        )
    return {
        name: packed.narrow(0, begins[name], prod(shape) * dtype.itemsize).view(dtype).view(shape)
        for name, (shape, dtype) in sections.items()
    }


_LENGTH = len(GroupedLayout._fields)
grouped_group = build_dequantizing_group(
    "grouped",
    "Tensor[] packed, int[] layouts",
    pack=lambda x, weights: ([packed for packed, _ in weights], [number for _, layout in weights for number in layout]),
    outs=lambda op: op.layouts[1::_LENGTH],
    check=lambda op: None,
    dense=lambda op, i: GroupedLayout(*op.layouts[i * _LENGTH :][:_LENGTH]).dequantize(op.packed[i], op.x.dtype),
)


def grouped_linear(x: Tensor, packed: Tensor, layout: GroupedLayout, bias: Tensor | None) -> Tensor:
    return frozen_linear(x, partial(GroupedLayout.dequantize, layout), (packed,), bias)
