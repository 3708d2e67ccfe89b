"""Read checkpoints with weights in FP8 (e4m3).

In all formats W = scale * q. They differ in which weights share a scale, and in the name of the scales for a weight X:

    fp8                 X_scale_inv: per block of 128 x 128 (DeepSeek-V3, Qwen3-FP8), or per tensor (Ministral 3)
    compressed-tensors  X_scale: per row, [O, 1], per tensor, or per block

Static input scales (`activation_scale`, `input_scale`) are for serving and are ignored: inputs stay in 16 bits or use
a scale per token. The files determine which tensors are in FP8; all other tensors stay in 16 bits.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import gcd, prod
from typing import Any, Literal

import torch
from torch import Tensor

from ops.reference import dequantize_blocks
from trainer.config import UserError
from trainer.model.stored_layout import StoredParameter
from trainer.model.tensor_files import SafetensorsFiles

E4M3 = "F8_E4M3"
SCALE_SUFFIXES = ("_scale_inv", "_scale")
SERVING_SUFFIXES = (
    "activation_scale",
    "input_scale",
    "output_scale",
    "k_scale",
    "v_scale",
    "q_scale",
    "weight_zero_point",
)
"""Suffixes of tensors used only for serving: scales of inputs, outputs and the KV cache."""
DEFAULT_BLOCK = (128, 128)
CONVERSIONS = ("MergeModulelist", "Concatenate", "Transpose")
"""transformers' conversions that apply to a grid of scales in the same way as to the values."""
SAME_MODEL_FIX = "use config.json and weights from the same model"
Block = tuple[int, int]


@dataclass(frozen=True)
class Fp8Format:
    """The FP8 format declared in config.json; `block` is None for one scale per row or tensor."""

    block: Block | None
    excluded: tuple[str, ...]
    name = "FP8"

    @property
    def scale_granularity(self) -> Literal["rows", "blocks"]:
        return "rows" if self.block is None else "blocks"

    def count_scale_bytes(self, shape: torch.Size) -> int:
        """Return the size in bytes of the scales for a weight [..., O, I]."""
        rows, cols = self.block or (1, shape[-1])
        return 4 * shape[:-2].numel() * -(-shape[-2] // rows) * -(-shape[-1] // cols)

    def is_quantized(self, path: str) -> bool:
        return not any(matches_module(entry, path) for entry in self.excluded)


def matches_module(pattern: str, path: str) -> bool:
    # compressed-tensors prefixes regular expressions with `re:`; transformers' entries may be expressions or suffixes.
    expression, end = (pattern[3:], "") if pattern.startswith("re:") else (pattern, r"(\.|$)")
    if path == pattern or path.endswith(f".{pattern}"):
        return True
    try:
        return re.match(f"(?:{expression}){end}", path) is not None
    except re.error:
        return False


def parse_fp8_format(model_config: Any) -> Fp8Format | None:
    """Return the FP8 format of a checkpoint; None if it is not in FP8 or its format is not supported."""
    settings = find_quantization_settings(model_config) or {}
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    if method == "fp8" and settings.get("expert_dtype", "fp8") == "fp8":
        block = settings.get("weight_block_size", DEFAULT_BLOCK)
        excluded = settings.get("modules_to_not_convert") or settings.get("ignored_layers") or ()
        return Fp8Format(_parse_block(block), tuple(map(str, excluded)))
    if method == "compressed-tensors":
        groups = [(group or {}).get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
        dense = (settings.get("sparsity_config") or {}).get("format", "dense") == "dense"
        is_fp8 = all(weights.get("num_bits") == 8 and weights.get("type") == "float" for weights in groups)
        if dense and groups and is_fp8:
            blocks = [weights.get("block_structure") for weights in groups if weights.get("strategy") == "block"]
            return Fp8Format(_parse_block(next(iter(blocks), None)), tuple(map(str, settings.get("ignore") or ())))
    return None


def find_quantization_settings(model_config: Any) -> dict[str, Any] | None:
    for part in (model_config, model_config.get_text_config()):
        section = getattr(part, "quantization_config", None)
        if section is not None:
            return section if isinstance(section, dict) else dict(section.to_dict())
    return None


def _parse_block(block: Any) -> Block | None:
    if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(isinstance(size, int) for size in block):
        return None
    return block[0], block[1]


class Fp8Files:
    """Reads the tensors of an FP8 checkpoint, dequantized (`read`) or as stored (`read_codes`, `read_scales`)."""

    def __init__(self, files: SafetensorsFiles, format_: Fp8Format) -> None:
        """Wrap `files`, which must have passed `read_fp8_shapes`."""
        self._files, self._block = files, format_.block or DEFAULT_BLOCK
        self._shapes = files.read_shapes()
        self._scale_names = find_scales(files)

    def read_shapes(self) -> dict[str, tuple[int, ...]]:
        scales = set(self._scale_names.values())
        unused = (*(f".{suffix}" for suffix in SERVING_SUFFIXES), "_activation_scale", "_input_scale")
        return {name: shape for name, shape in self._shapes.items() if name not in scales and not name.endswith(unused)}

    def read(self, name: str, index: int | None = None) -> Tensor:
        if name not in self._scale_names:
            return self._files.read(name, index)
        block = self._get_stored_block(name)
        codes, scales = self._read_codes(name, index), self._read_scales(block, name, index)
        return dequantize_blocks(codes, scales, block, torch.float32)

    def find_block(self, stored: StoredParameter, dimensions: int) -> Block | None:
        """Return the rows and columns per scale for the parameter built from `stored`; None if it must be dequantized.

        Blocks shrink if concatenated parts do not consist of whole blocks of rows.
        """
        names = [name for group in stored.names.values() for name in group]
        if not all(name in self._scale_names for name in names):
            return None
        blocks = {self._get_stored_block(name) for name in names}
        if len(blocks) != 1:
            return None
        [(rows, cols)] = blocks
        if stored.converter is None:
            return rows, cols
        kinds = {type(operation).__name__: operation for operation in stored.converter.operations}
        if not set(kinds) <= set(CONVERSIONS):
            return None
        if "Concatenate" in kinds:
            if kinds["Concatenate"].dim != dimensions - 2:
                return None
            for name in names:
                rows = gcd(self._shapes[name][-2], rows)
        return (rows, cols) if "Transpose" not in kinds or rows == cols else None

    def read_codes(self, stored: StoredParameter, index: int | None = None) -> Tensor:
        """Read the stored values (uint8) in the parameter's layout."""
        return stored.read(TensorView(self.read_shapes, self._read_codes), index)

    def read_scales(self, stored: StoredParameter, block: Block, index: int | None = None) -> Tensor:
        """Read one fp32 scale per `block` in the parameter's layout."""
        return stored.read(TensorView(self.read_shapes, partial(self._read_scales, block)), index)

    def _read_codes(self, name: str, index: int | None = None) -> Tensor:
        return self._files.read(name, index).view(torch.uint8)

    def _get_stored_block(self, name: str) -> Block:
        """Return the rows and columns per stored scale, treating a per-tensor scale as one per row."""
        shape = self._shapes[name]
        has_row_scales = _has_row_scales(shape, self._shapes[self._scale_names[name]])
        return (1, shape[-1]) if has_row_scales else self._block

    def _read_scales(self, block: Block, name: str, index: int | None = None) -> Tensor:
        shape, scale = self._shapes[name], self._scale_names[name]
        matrices = shape[:-2] if index is None else (1,)
        raw = self._files.read(scale, index if len(shape) > 2 and self._shapes[scale] else None).float()
        if _has_row_scales(shape, self._shapes[scale]):
            return raw.reshape(*matrices, -1, 1).expand(*matrices, shape[-2], -(-shape[-1] // block[1])).contiguous()
        for axis, stored, target_size in ((-2, self._block[0], block[0]), (-1, self._block[1], block[1])):
            if stored != target_size:
                indices = torch.arange(-(-shape[axis] // target_size)) * target_size // stored
                raw = raw.index_select(axis, indices)
        return raw


@dataclass(frozen=True)
class TensorView:
    """Implements `StoredTensors` with two given functions."""

    read_shapes: Callable[[], dict[str, tuple[int, ...]]]
    read: Callable[..., Tensor]


def find_scales(files: SafetensorsFiles) -> dict[str, str]:
    types = files.read_types()
    names = {
        name: [name + end for end in SCALE_SUFFIXES if name + end in types] for name in types if types[name] == E4M3
    }
    return {name: candidates[0] for name, candidates in names.items() if candidates}


def read_fp8_shapes(setting: str, files: SafetensorsFiles, format_: Fp8Format) -> dict[str, tuple[int, ...]]:
    """Return the dequantized shapes by name. Raises UserError if scales are missing or wrong, or nothing is in FP8."""
    shapes, types, scales = files.read_shapes(), files.read_types(), find_scales(files)
    rows, cols = format_.block or DEFAULT_BLOCK
    if not scales and E4M3 not in types.values():
        fix = "remove quantization_config from config.json"
        raise UserError(f"{setting}: config.json says FP8, but no tensor is in that format; {fix}")
    for name in sorted(name for name, kind in types.items() if kind.startswith("F8") or kind in ("I8", "U8")):
        if types[name] == "F8_E8M0" and name in scales.values():
            continue
        if types[name] != E4M3:
            raise UserError(
                f"{setting}: {name} is stored as {types[name]}, but only e4m3 is supported in 8 bits; use the "
                "16-bit model"
            )
        if name not in scales:
            raise UserError(
                f"{setting}: {name} is stored in FP8, but {name}{SCALE_SUFFIXES[0]} is missing; download it again"
            )
        shape, scale_shape = shapes[name], shapes[scales[name]]
        if len(shape) < 2:
            raise UserError(
                f"{setting}: {name} is stored in FP8, but is not a matrix (shape {shape}); use the 16-bit model"
            )
        grid = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // cols))
        if scale_shape != grid and not _has_row_scales(shape, scale_shape):
            raise UserError(
                f"{setting}: {name} has shape {shape} and {scales[name]} {scale_shape}, but blocks of {rows} x {cols} "
                f"need {grid}; {SAME_MODEL_FIX}"
            )
    return Fp8Files(files, format_).read_shapes()


def _has_row_scales(shape: tuple[int, ...], scales: tuple[int, ...]) -> bool:
    matrices, rows, count = prod(shape[:-2]), shape[-2], prod(scales)
    has_no_columns = not scales or scales[-1] == 1 or len(scales) < len(shape)
    return count == matrices or (count == matrices * rows and has_no_columns)
