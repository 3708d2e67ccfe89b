"""The experts of one tensor in 4 bits (NF4 or FP4 of bitsandbytes, MXFP4 as gpt-oss has it) or in 8 (FP8, int8).

Codes and scales of all experts lie in one Parameter of bytes, so that whatever moves parameters (ZeRO, offload, the
gather of a layer) moves all of a tensor at once. The sections, each with its experts one after the other:

    codes     half a byte a value, or a byte, experts' matrices quantised one by one
    scales    NF4: one of 32 bits a block, or of 8 bits with double quantisation; MXFP4: an exponent for 32 values;
              8 bits: one of 32 bits for each row, or for each block of rows and columns
    nested    with double quantisation: scales of 256 scales, and the mean that was taken off them, 32 bits
    books     the 16 values of a code and the 256 of a scale, 32 bits
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit
from torch import Tensor, nn

from ops.eight_bit import STORAGE
from ops.reference import dequantize_blocks, quantize_rows
from trainer.config import QuantizationSection
from trainer.contract.known_versions import require
from trainer.model import mxfp4

MXFP4 = mxfp4.MXFP4
NESTED_BLOCK = 256
Sections = dict[str, tuple[tuple[int, ...], torch.dtype]]
_ALIGNMENT = 256


@dataclass(frozen=True)
class ExpertsLayout:
    """How `experts` matrices [rows, cols] are packed."""

    kind: str
    """`nf4`, `fp4`, `mxfp4`, `fp8` (e4m3) or `int8`."""
    experts: int
    rows: int
    cols: int
    dtype: torch.dtype
    """What they are computed in."""
    transposed: bool = False
    """The model's own tensor is [experts, cols, rows]."""
    block: int = mxfp4.BLOCK
    double_quant: bool = False
    cell: tuple[int, int] = (0, 0)
    """8 bits: rows and columns that share a scale."""

    @property
    def eight_bit(self) -> bool:
        """Whether a value has 8 bits."""
        return self.kind in STORAGE

    @property
    def grid(self) -> tuple[int, int]:
        """8 bits: scales of one expert."""
        return -(-self.rows // self.cell[0]), -(-self.cols // self.cell[1])

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the model's own tensor."""
        return (self.experts, self.cols, self.rows) if self.transposed else (self.experts, self.rows, self.cols)

    @property
    def blocks(self) -> int:
        """Blocks of one expert."""
        return -(-self.rows * self.cols // self.block)

    def sections(self) -> Sections:
        """Shape and type of each section, in their order."""
        if self.eight_bit:
            values = ((self.experts, self.rows, self.cols), STORAGE[self.kind])
            return {"codes": values, "scales": ((self.experts, *self.grid), torch.float32)}
        count = -(-self.rows * self.cols // 2)
        codes: Sections = {"codes": ((self.experts, count), torch.uint8)}
        if self.kind == MXFP4:
            return codes | {"scales": ((self.experts, self.blocks), torch.uint8)}
        book: Sections = {"book": ((16,), torch.float32)}
        if not self.double_quant:
            return codes | {"scales": ((self.experts, self.blocks), torch.float32)} | book
        return codes | {
            "scales": ((self.experts, self.blocks), torch.uint8),
            "nested": ((self.experts, -(-self.blocks // NESTED_BLOCK)), torch.float32),
            "offsets": ((self.experts,), torch.float32),
            **book,
            "nested_book": ((256,), torch.float32),
        }

    def offsets(self) -> tuple[dict[str, int], int]:
        """Where each section begins, and how many bytes there are."""
        begins, end = {}, 0
        for name, (shape, dtype) in self.sections().items():
            begins[name] = end
            end = -(-(end + prod(shape) * dtype.itemsize) // _ALIGNMENT) * _ALIGNMENT
        return begins, end


class PackedExperts(nn.Parameter):
    """All experts of one tensor in one Parameter of bytes, under the name of the tensor that it stands for."""

    packing: ExpertsLayout

    def __new__(cls, data: Tensor, layout: ExpertsLayout) -> "PackedExperts":
        """`data` holds the bytes of all sections."""
        packed = torch.Tensor._make_subclass(cls, data, False)
        packed.packing = layout
        return packed

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedExperts":
        """With its layout."""
        memo[id(self)] = copied = PackedExperts(self.data.clone(), self.packing)
        return copied

    @staticmethod
    def empty(layout: ExpertsLayout, device: torch.device) -> "PackedExperts":
        """Room for the experts."""
        return PackedExperts(torch.zeros(layout.offsets()[1], dtype=torch.uint8, device=device), layout)

    def sections(self) -> dict[str, Tensor]:
        """Views of the sections; under ZeRO-3 while the parameter is gathered."""
        begins, size = self.packing.offsets()
        assert self.numel() == size, f"{self.numel()} bytes of {size}: the parameter is not gathered"
        return {
            name: self.data.narrow(0, begins[name], prod(shape) * dtype.itemsize).view(dtype).view(shape)
            for name, (shape, dtype) in self.packing.sections().items()
        }

    def quantize(self, index: int, matrix: Tensor) -> None:
        """Pack one expert's matrix, as the model's own tensor has it: by rows to 8 bits, or by bitsandbytes to 4."""
        layout, sections = self.packing, self.sections()
        matrix = (matrix.t() if layout.transposed else matrix).to(layout.dtype).contiguous()
        if layout.eight_bit:
            codes, row_scale = quantize_rows(matrix, STORAGE[layout.kind])
            self.put_expert(index, codes, row_scale[:, None])
            return
        packed, state = quantize_4bit(
            matrix,
            blocksize=layout.block,
            compress_statistics=layout.double_quant,
            quant_type=layout.kind,
            quant_storage=torch.uint8,
        )
        sections["codes"][index] = packed.view(-1)
        sections["scales"][index] = state.absmax
        sections["book"].copy_(state.code)
        if layout.double_quant:
            inner = require(state, "state2", "bitsandbytes")
            assert inner.blocksize == NESTED_BLOCK, inner.blocksize
            sections["nested"][index] = inner.absmax
            sections["offsets"][index] = state.offset
            sections["nested_book"].copy_(inner.code)

    def put_expert(self, index: int, codes: Tensor, scales: Tensor) -> None:
        """One expert's 8-bit values [rows, cols] and their scales."""
        sections = self.sections()
        sections["codes"][index] = codes
        sections["scales"][index] = scales

    def dequantized(self, out: Tensor | None = None) -> Tensor:
        """The model's own tensor, in `out` if given."""
        layout = self.packing
        if out is None:
            out = torch.empty(layout.shape, dtype=layout.dtype, device=self.device)
        if layout.eight_bit:
            sections = self.sections()
            wanted = out.mT if layout.transposed else out
            dequantize_blocks(sections["codes"], sections["scales"], layout.cell, layout.dtype, wanted)
            return out
        if layout.kind != MXFP4 and layout.rows * layout.cols % layout.block == 0 and not layout.transposed:
            sections = self.sections()
            scales = _scales_in_32_bits(sections, layout).view(-1)
            return _read_codes(sections["codes"], scales, sections["book"], layout, out.view(1, -1)).view(layout.shape)
        for index in range(layout.experts):
            matrix = self.expert(index)
            out[index] = matrix.t() if layout.transposed else matrix
        return out

    def expert(self, index: int) -> Tensor:
        """One expert's matrix [rows, cols]."""
        layout, sections = self.packing, self.sections()
        if layout.eight_bit:
            return dequantize_blocks(sections["codes"][index], sections["scales"][index], layout.cell, layout.dtype)
        if layout.kind == MXFP4:
            codes, scales = sections["codes"][index], sections["scales"][index]
            return mxfp4.dequantized(codes, scales, layout.dtype).view(layout.rows, layout.cols)
        return _from_4_bits(sections, index, layout)


def _from_4_bits(sections: dict[str, Tensor], index: int, layout: ExpertsLayout) -> Tensor:
    """As `dequantize_4bit` of bitsandbytes for this expert's matrix alone."""
    own = {name: section[index : index + 1] for name, section in sections.items() if "book" not in name}
    scales = _scales_in_32_bits(sections | own, layout).view(-1)
    count = layout.rows * layout.cols
    if count % layout.block == 0 or scales.device.type != "cpu":
        out = torch.empty((1, count), dtype=layout.dtype, device=scales.device)
        return _read_codes(own["codes"], scales, sections["book"], layout, out).view(layout.rows, layout.cols)
    packed = own["codes"].view(-1)
    codes = torch.stack((packed >> 4, packed & 15), dim=1).view(-1)[:count].int()
    of_each = scales.repeat_interleave(layout.block)[:count]
    return (sections["book"][codes] * of_each).to(layout.dtype).view(layout.rows, layout.cols)


def _scales_in_32_bits(sections: dict[str, Tensor], layout: ExpertsLayout) -> Tensor:
    """The scale of each block [experts, blocks]."""
    if not layout.double_quant:
        return sections["scales"]
    nested = sections["nested"].repeat_interleave(NESTED_BLOCK, dim=1)[:, : layout.blocks]
    return sections["nested_book"][sections["scales"].int()] * nested + sections["offsets"][:, None]


def _read_codes(codes: Tensor, scales: Tensor, book: Tensor, layout: ExpertsLayout, out: Tensor) -> Tensor:
    """In one row: on a CPU bitsandbytes 0.50.2 takes wrong scales where a row holds no whole number of blocks."""
    state = QuantState(
        scales, shape=out.shape, code=book, blocksize=layout.block, quant_type=layout.kind, dtype=layout.dtype
    )
    if out.is_cuda:
        dequantize_4bit(codes.view(-1, 1), state, out=out)
        return out
    return out.copy_(dequantize_4bit(codes.view(-1, 1), state))  # bitsandbytes has no `out` on a CPU


def nf4_layout(
    shape: torch.Size, section: QuantizationSection, dtype: torch.dtype, *, transposed: bool = False
) -> ExpertsLayout:
    """The layout of a model's tensor [experts, a, b] that is quantised to 4 bits."""
    experts, rows, cols = shape
    if transposed:
        rows, cols = cols, rows
    return ExpertsLayout(
        section.quant_type, experts, rows, cols, dtype, transposed, section.block_size, section.double_quant
    )


def eight_bit_layout(
    shape: torch.Size, kind: str, dtype: torch.dtype, *, transposed: bool = False, cell: tuple[int, int] | None = None
) -> ExpertsLayout:
    """The layout of a model's tensor [experts, a, b] in 8 bits; without `cell` each row has its scale."""
    experts, rows, cols = shape
    if transposed:
        rows, cols = cols, rows
    return ExpertsLayout(kind, experts, rows, cols, dtype, transposed, cell=cell or (1, cols))


def mxfp4_layout(shape: torch.Size, dtype: torch.dtype) -> ExpertsLayout:
    """The layout of a model's tensor [experts, in, out] of which [experts, out, in] is stored in MXFP4."""
    experts, cols, rows = shape
    return ExpertsLayout(MXFP4, experts, rows, cols, dtype, transposed=True)
