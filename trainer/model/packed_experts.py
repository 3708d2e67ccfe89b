"""Pack expert tensors into 4 bits (bitsandbytes' NF4 or FP4, MXFP4 as in gpt-oss) or 8 bits (FP8, int8).

Experts and linear layers that are stored in 4-bit groups (GPTQ, AWQ, W4A16, NVFP4) use the layout of ops/grouped.py.

The codes and scales of all experts are in one Parameter of bytes, so that ZeRO, offload and the per-layer all-gather
move them together. Its sections, in expert order:

    codes     half a byte or one byte per value; each expert's matrix is quantized separately
    scales    NF4: fp32 per block, or 8 bits with double quantization; MXFP4: an exponent per 32 values;
              8 bits: fp32 per row, or per block of rows and columns
    nested    double quantization: one fp32 scale per 256 scales
    offsets   double quantization: the mean subtracted from the scales, in fp32
    book      the codebook: the 16 values of the codes; `nested_book`: the 256 values of 8-bit scales; both in fp32

Experts without an adapter run the model's own code on dequantized weights. The backward pass dequantizes them again
and recomputes the experts, so that only the current layer has 16-bit weights.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ops
from ops import reference
from ops.eight_bit import STORAGE
from ops.grouped import Sections, place_sections, view_sections
from ops.reference import dequantize_blocks, quantize_rows
from trainer.contract.known_versions import patch_objects, replaces, require
from trainer.model import mxfp4
from trainer.model.eight_bit import check_input

MXFP4 = mxfp4.MXFP4
NESTED_BLOCK = 256
GROUPED = "grouped"


@dataclass(frozen=True)
class ExpertsLayout:
    kind: str
    """`nf4`, `fp4`, `mxfp4`, `fp8` (e4m3), `int8` or `grouped`."""
    experts: int
    """Number of experts; 0 for a linear layer."""
    rows: int
    cols: int
    dtype: torch.dtype
    """Dtype of the dequantized values."""
    transposed: bool = False
    """Whether the model's own tensor is [experts, cols, rows]."""
    block: int = mxfp4.BLOCK
    double_quant: bool = False
    cell: tuple[int, int] = (0, 0)
    """Rows and columns that share a scale (8-bit values only)."""
    groups: Any = None
    """A `GroupedLayout`, if `kind` is `grouped`."""

    @property
    def is_8bit(self) -> bool:
        return self.kind in STORAGE

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the unpacked tensor, as in the model."""
        if not self.experts:
            return self.rows, self.cols
        return (self.experts, self.cols, self.rows) if self.transposed else (self.experts, self.rows, self.cols)

    @property
    def blocks(self) -> int:
        return -(-self.rows * self.cols // self.block)

    def sections(self) -> Sections:
        if self.groups is not None:
            return self.groups.sections()
        if self.is_8bit:
            values = ((self.experts, self.rows, self.cols), STORAGE[self.kind])
            grid = -(-self.rows // self.cell[0]), -(-self.cols // self.cell[1])
            return {"codes": values, "scales": ((self.experts, *grid), torch.float32)}
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


class PackedExperts(nn.Parameter):
    """An expert tensor packed into one Parameter of bytes, which replaces the original under the same name."""

    packing: ExpertsLayout

    def __new__(cls, data: Tensor, layout: ExpertsLayout) -> "PackedExperts":
        packed = torch.Tensor._make_subclass(cls, data, False)
        packed.packing = layout
        return packed

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedExperts":
        memo[id(self)] = copied = PackedExperts(self.data.clone(), self.packing)
        return copied

    @staticmethod
    def empty(layout: ExpertsLayout, device: torch.device) -> "PackedExperts":
        size = place_sections(layout.sections())[1]
        return PackedExperts(torch.zeros(size, dtype=torch.uint8, device=device), layout)

    def sections(self) -> dict[str, Tensor]:
        """Return views of the sections by name; under ZeRO-3, gather the parameter first."""
        return view_sections(self.data, self.packing.sections())

    def quantize(self, index: int, matrix: Tensor) -> None:
        """Quantize and pack one expert's matrix, given in the model's layout. 8-bit formats use one scale per row."""
        layout, sections = self.packing, self.sections()
        matrix = (matrix.t() if layout.transposed else matrix).to(layout.dtype).contiguous()
        if layout.is_8bit:
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
        sections = self.sections()
        sections["codes"][index] = codes
        sections["scales"][index] = scales

    def dequantize(self) -> Tensor:
        layout = self.packing
        if layout.groups is not None:
            dense = layout.groups.dequantize(self.data, layout.dtype)
            return dense.mT if layout.transposed else dense
        out, sections = torch.empty(layout.shape, dtype=layout.dtype, device=self.device), self.sections()
        if layout.is_8bit:
            out_by_row = out.mT if layout.transposed else out
            dequantize_blocks(sections["codes"], sections["scales"], layout.cell, layout.dtype, out_by_row)
            return out
        if layout.kind != MXFP4 and layout.rows * layout.cols % layout.block == 0 and not layout.transposed:
            scales = _dequantize_scales(sections, layout).view(-1)
            _dequantize_codes(sections["codes"], scales, sections["book"], layout, out.view(1, -1))
            return out
        for index in range(layout.experts):
            matrix = self.dequantize_expert(index)
            out[index] = matrix.t() if layout.transposed else matrix
        return out

    def dequantize_expert(self, index: int) -> Tensor:
        """Return one expert's dequantized matrix [rows, cols]."""
        layout, sections = self.packing, self.sections()
        if layout.groups is not None:
            parts = [section[index] for section in sections.values()]
            return reference.dequantize_groups(parts, layout.groups.is_float, layout.groups.group, layout.dtype)
        if layout.is_8bit:
            return dequantize_blocks(sections["codes"][index], sections["scales"][index], layout.cell, layout.dtype)
        if layout.kind == MXFP4:
            codes, scales = sections["codes"][index], sections["scales"][index]
            return mxfp4.dequantize(codes, scales, layout.dtype).view(layout.rows, layout.cols)
        sections |= {name: section[index : index + 1] for name, section in sections.items() if "book" not in name}
        codes, scales, book = sections["codes"], _dequantize_scales(sections, layout).view(-1), sections["book"]
        if layout.rows * layout.cols % layout.block == 0 or scales.device.type != "cpu":
            out = torch.empty((layout.rows, layout.cols), dtype=layout.dtype, device=scales.device)
            _dequantize_codes(codes, scales, book, layout, out.view(1, -1))
            return out
        sizes = layout.rows, layout.cols, layout.block
        return reference.dequantize_nf4(codes, (scales, book), *sizes, 1, layout.dtype)


def _dequantize_scales(sections: dict[str, Tensor], layout: ExpertsLayout) -> Tensor:
    if not layout.double_quant:
        return sections["scales"]
    nested = sections["nested"].repeat_interleave(NESTED_BLOCK, dim=1)[:, : layout.blocks]
    return sections["nested_book"][sections["scales"].int()] * nested + sections["offsets"][:, None]


def _dequantize_codes(codes: Tensor, scales: Tensor, codebook: Tensor, layout: ExpertsLayout, out: Tensor) -> None:
    """Dequantize codes into a row. On a CPU, bitsandbytes 0.50.2 uses wrong scales for rows with partial blocks."""
    state = QuantState(
        scales, shape=out.shape, code=codebook, blocksize=layout.block, quant_type=layout.kind, dtype=layout.dtype
    )
    if out.is_cuda:
        dequantize_4bit(codes.view(-1, 1), state, out=out)
    else:
        out.copy_(dequantize_4bit(codes.view(-1, 1), state))  # bitsandbytes has no `out` on a CPU


def build_experts_layout(
    kind: str,
    shape: torch.Size,
    dtype: torch.dtype,
    *,
    transposed: bool = False,
    scale_block: tuple[int, int] | None = None,
    **four_bit_options: Any,
) -> ExpertsLayout:
    """Build the layout for a tensor [experts, a, b]. 8-bit values have a scale per `scale_block` (default: per row)."""
    experts, *matrix = shape
    rows, cols = reversed(matrix) if transposed else matrix
    return ExpertsLayout(
        kind, experts, rows, cols, dtype, transposed, cell=scale_block or (1, cols), **four_bit_options
    )


class FrozenLinearGrouped(nn.Linear):
    """Frozen linear layer that dequantizes its 4-bit weight for each matmul, and that PEFT treats as an nn.Linear."""

    def __init__(self, linear: Any, weight: PackedExperts) -> None:
        """Take over the bias of `linear`. The layout of `weight` sets the compute dtype."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.compute_dtype, self.layout = weight.packing.dtype, weight.packing.groups
        self.weight, self.bias = weight, linear.bias

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return self.layout.dequantize(self.weight.data, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return y[..., O] in the dtype of x, computed in the layer's compute dtype."""
        check_input(x)
        return ops.grouped_linear(x.to(self.compute_dtype), self.weight, self.layout, self.bias).to(x.dtype)


@replaces("the forward of quantized experts")
def install_dequantized_forward(module: nn.Module) -> None:
    module.forward = partial(forward_frozen, module, module.forward)


def list_packed_tensors(module: nn.Module) -> dict[str, PackedExperts]:
    return {name: value for name, value in module._parameters.items() if isinstance(value, PackedExperts)}


def forward_frozen(module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a module's `forward` on dequantized weights, and recompute it in the backward pass."""
    return checkpoint(
        _forward_dequantized, module, forward, args, kwargs, use_reentrant=False, preserve_rng_state=False
    )


def _forward_dequantized(module: nn.Module, forward: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with patch_objects(*((module, name, packed.dequantize()) for name, packed in list_packed_tensors(module).items())):
        return forward(*args, **kwargs)
