"""Read checkpoints with 4-bit linear layers: GPTQ, AWQ, and compressed-tensors' W4A16 and NVFP4.

All formats store codes with a scale per group of columns, and are converted to the layout of
ops/grouped.py. They store these tensors for a weight X [O, I] with G groups of columns:

    GPTQ    X.qweight [I/8, O], X.qzeros [G, O/8], X.scales [G, O], X.g_idx [I];
            version 1 stores each zero point minus one
    AWQ     X.qweight [I, O/8], X.qzeros [G, O/8], X.scales [G, O];
            qweight and qzeros store columns in the order 0 2 4 6 1 3 5 7
    W4A16   X.weight_packed [O, I/8], X.weight_scale [O, G], X.weight_zero_point [O/8, G],
            X.weight_g_idx [I]
    NVFP4   X.weight_packed [O, I/2] in bytes of two E2M1 codes, X.weight_scale [O, G] in e4m3,
            X.weight_global_scale [1], by which the scales are divided

Each int32 contains eight codes, the lowest bits first. The files determine which layers are stored in 4 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ops.grouped import SCALE_DTYPES, GroupedLayout, place_sections
from ops.reference import dequantize_groups
from trainer.config import UserError
from trainer.model.mxfp4 import round_to_codes
from trainer.model.stored_fp8 import (
    CONVERSIONS,
    SAME_MODEL_FIX,
    SERVING_SUFFIXES,
    TensorView,
    find_quantization_settings,
    matches_module,
)
from trainer.model.stored_layout import StoredParameter
from trainer.model.tensor_files import SafetensorsFiles

COLUMN_PARTS = {"codes": "qweight", "scales": "scales", "zeros": "qzeros", "order": "g_idx"}
PARTS = {"codes": "weight_packed", "scales": "weight_scale", "zeros": "weight_zero_point", "order": "weight_g_idx"}
PARTS |= {"divisors": "weight_global_scale", "shape": "weight_shape"}
"""Names of a layer's stored tensors, by section of the packed layout; GPTQ and AWQ use COLUMN_PARTS."""
SCALE_TYPES = ("F32", "F16", "BF16", "F8_E4M3")
"""Safetensors names of the types in ops.grouped.SCALES."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Positions of 8 adjacent columns in an int32 (AWQ)."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class FourBitFormat:
    name: Literal["GPTQ", "AWQ", "W4A16", "NVFP4"]
    group: int
    """Columns per scale; 0 for one scale per row."""
    has_zeros: bool
    excluded: tuple[str, ...]
    has_order: bool = False
    """Whether the columns of a group are not adjacent (`desc_act`)."""
    offset: int = 0
    """Value added to stored zero points, modulo 16."""
    scale_granularity: Literal["groups"] = "groups"

    def is_quantized(self, path: str) -> bool:
        is_in_layer = any(part.isdigit() for part in path.split("."))
        is_match = str.__contains__ if self.name == "AWQ" else lambda path, entry: matches_module(entry, path)
        return is_in_layer and not any(is_match(path, entry) for entry in self.excluded)

    def build_layout(self, shape: Sequence[int], scale: int | None = None) -> GroupedLayout:
        """Return the packed layout of a weight [O, I] or [E, O, I].

        `scale` is the dtype of the scales as an index into SCALE_TYPES. None selects fp16, or e4m3 for NVFP4.
        """
        *experts, rows, cols = shape
        is_float, group = int(self.name == "NVFP4"), self.group or cols
        scale = SCALE_TYPES.index("F8_E4M3" if is_float else "F16") if scale is None else scale
        flags = is_float, int(self.has_zeros), is_float, int(self.has_order)
        return GroupedLayout(next(iter(experts), 0), rows, cols, group, scale, *flags)

    def count_scale_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes that a packed weight needs besides codes: scales, zero points, other sections, alignment."""
        return place_sections(self.build_layout(shape).sections())[1] - torch.Size(shape).numel() // 2


def parse_four_bit_format(model_config: Any) -> FourBitFormat | str | None:
    """Return the 4-bit format of a checkpoint, or why it is not supported; None for other quantization methods."""
    settings = find_quantization_settings(model_config) or {}
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    if method == "compressed-tensors":
        return _parse_compressed(settings)
    return _parse_gptq_or_awq(settings, method.upper()) if method in ("gptq", "awq") else None


def _parse_gptq_or_awq(settings: dict[str, Any], method: Any) -> FourBitFormat | str:
    supported = ("gptq", "gptq_v2") if method == "GPTQ" else ("gemm",)
    declared = filter(None, map(settings.get, ("checkpoint_format", "version", "format")))
    version = str(next(declared, supported[0])).lower()
    version = "marlin" if settings.get("is_marlin_format") else version
    version = "llm-awq" if settings.get("backend") == "llm-awq" else version
    rules: dict[str, dict[str, Any] | None] = settings.get("dynamic") or {}
    bits = {settings.get("bits", settings.get("w_bit")), *((rule or {}).get("bits", 4) for rule in rules.values())}
    if bits != {4}:
        return f"{' and '.join(sorted(map(str, bits - {4})))} bits, but only 4 are supported"
    if version not in supported:
        return f"version {version}, but only {' and '.join(supported)} are supported"
    excluded = settings.get("modules_to_not_convert") or (f"re:{rule[2:]}" for rule in rules if rule.startswith("-:"))
    group = -1 if (group := settings.get("group_size", 128)) is None else group
    if group != -1 and group < 1:
        return f"group_size {group}, but only -1 (one group per row) and positive values are supported"
    has_order = bool(settings.get("desc_act"))
    return FourBitFormat(method, max(0, group), True, tuple(excluded), has_order, int(version == "gptq"))


def _parse_compressed(settings: dict[str, Any]) -> FourBitFormat | str | None:
    groups = [group or {} for group in (settings.get("config_groups") or {}).values()]
    weights: list[dict[str, Any]] = [group.get("weights") or {} for group in groups]
    if not any(part.get("num_bits") == 4 for part in weights):
        return None
    first, excluded = weights[0], tuple(settings.get("ignore") or ())
    strategy, kind, group = first.get("strategy"), first.get("type"), first.get("group_size")
    group = group if isinstance(group, int) and group > 0 else 0
    is_supported = strategy == "tensor_group" and group == 16 if kind == "float" else strategy in ("group", "channel")
    faults = {
        "with layers of several data types": len({str((part.get("num_bits"), part.get("type"))) for part in weights})
        > 1,
        "with quantized inputs, as in W4A4": any(group.get("input_activations") for group in groups),
        "with sparse weights": (settings.get("sparsity_config") or {}).get("format", "dense") != "dense",
        "with rotated inputs (transform_config)": bool(settings.get("transform_config")),
        f"with 4-bit {kind} weights (strategy {strategy}, group_size {group})": not is_supported,
    }
    if fault := next((fault for fault, applies in faults.items() if applies), ""):
        return f"{fault}, but the only supported 4-bit formats are NVFP4 and W4A16 integers per group or channel"
    if kind == "float":
        return FourBitFormat("NVFP4", group, False, excluded)
    has_order = str(first.get("actorder")).lower().endswith("group")
    return FourBitFormat("W4A16", group, not first.get("symmetric", True), excluded, has_order)


class FourBitFiles:
    """Reads the tensors of a 4-bit checkpoint: `read` dequantizes them, `fill` copies their codes and scales."""

    def __init__(self, files: SafetensorsFiles, format_: FourBitFormat, setting: str) -> None:
        """Find the packed weights. Raises UserError, prefixed with `setting`, if none exists or one is invalid."""
        self._files, self._format, self._setting = files, format_, setting
        self._shapes, self._types = files.read_shapes(), files.read_types()
        self._by_column = format_.name in ("GPTQ", "AWQ")
        self._parts = COLUMN_PARTS if self._by_column else PARTS
        codes = f".{self._parts['codes']}"
        paths = [name.removesuffix(codes) for name in self._shapes if name.endswith(codes)]
        self.layouts = {f"{path}.weight": self._find_layout(path) for path in paths}
        parts = {f"{path}.{part}" for path in paths for part in self._parts.values()}
        plain = {name for name in self._shapes if name not in parts and name.rpartition(".")[2] not in SERVING_SUFFIXES}
        self._plain = {name: self._shapes[name] for name in plain}
        if not self.layouts:
            fix = "remove quantization_config from config.json"
            raise UserError(f"{setting}: config.json says {format_.name}, but no tensor is in that format; {fix}")
        for name, shape in self._plain.items():
            if self._types[name].startswith(("F8", "I8", "U8", "I32")) and len(shape) > 1:
                raise UserError(
                    f"{setting}: {name} is stored as {self._types[name]}, which {format_.name} does not use; "
                    "use the 16-bit model"
                )

    def read_shapes(self) -> dict[str, Shape]:
        return self._plain | {name: (layout.rows, layout.cols) for name, layout in self.layouts.items()}

    def read(self, name: str, index: int | None = None) -> Tensor:
        if name not in self.layouts:
            return self._files.read(name, index)
        weight = self._dequantize(self.layouts[name], self._read_parts(name))
        return weight if index is None else weight[index : index + 1]

    def _read_parts(self, name: str) -> dict[str, Tensor]:
        return {part: self._read_part(part, name) for part in self.layouts[name].sections()}

    def _dequantize(self, layout: GroupedLayout, parts: dict[str, Tensor]) -> Tensor:
        views = parts | {"scales": parts["scales"].view(SCALE_DTYPES[layout.scale]), "order": parts["order"].view(-1)}
        return dequantize_groups(list(views.values()), layout.is_float, layout.group, torch.float32)

    def find_layout(self, stored: StoredParameter, shape: Sequence[int], *, transposed: bool) -> GroupedLayout | None:
        """Return a parameter's packed layout; None if it must be unpacked. `shape` is [.., I, O] if `transposed`."""
        names = [name for group in stored.names.values() for name in group]
        operations = stored.converter.operations if stored.converter else ()
        kinds = {type(operation).__name__: operation for operation in operations}
        *experts, rows, _ = (*shape[:-2], *reversed(shape[-2:])) if transposed else shape
        layouts = {self.layouts[name]._replace(rows=rows) for name in names if name in self.layouts}
        is_joined = "Concatenate" not in kinds or kinds["Concatenate"].dim == len(shape) - 2
        is_uniform = len(layouts) == 1 and all(name in self.layouts for name in names)
        if not (is_uniform and is_joined and set(kinds) <= set(CONVERSIONS) and transposed == ("Transpose" in kinds)):
            return None
        return layouts.pop()._replace(experts=next(iter(experts), 0))

    def fill(self, stored: StoredParameter, sections: dict[str, Tensor], experts: int, *, transposed: bool) -> None:
        """Copy the stored parts of a parameter into `sections`, one expert at a time if possible."""
        for part, section in sections.items():
            section = section.view(torch.uint8) if section.dtype == torch.float8_e4m3fn else section
            view = TensorView(self.read_shapes, partial(self._read_part, part))
            for index in range(experts) if experts and stored.is_separable_by_expert else [None]:
                if not section.numel():
                    break
                value = stored.read(view, index)
                value = value.mT if transposed else value
                if part == "order":
                    if not (value == value[..., :1, :]).all():
                        name = self._parts["order"]
                        raise UserError(
                            f"{self._setting}: tensors of {stored.target} have different {name}; use the 16-bit model"
                        )
                    value = value[..., 0, :]
                section[slice(None) if index is None else slice(index, index + 1)] = value

    def requantize(self, name: str, target: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Quantize `target` [O, I] with the stored scales; return packed tensors and the dequantized weight [O, I]."""
        layout, path, parts = self.layouts[name], name.removesuffix(".weight"), self._read_parts(name)
        order = parts["order"].view(-1) if layout.has_order else torch.arange(layout.cols) // layout.group
        scale = parts["scales"].view(SCALE_DTYPES[layout.scale]).float()
        scale = (scale / parts["divisors"] if layout.has_divisors else scale)[:, order]
        steps = torch.where(scale == 0, 0.0, target / scale)
        zero = parts["zeros"][:, order].float() if layout.has_zeros else 8.0
        codes = round_to_codes(steps) if layout.is_float else (steps + zero).round().clamp(0, 15).to(torch.uint8)
        names = [f"{path}.{part}" for part in self._parts.values()]
        tensors = {stored: self._files.read(stored) for stored in names if stored in self._shapes}
        parts["codes"] = pack_pairs(codes)
        tensors[f"{path}.{self._parts['codes']}"] = self._pack_codes(codes)
        return tensors, self._dequantize(layout, parts)

    def _pack_codes(self, codes: Tensor) -> Tensor:
        if self._format.name == "AWQ":
            words = codes.mT.to(torch.int32).unflatten(-1, (-1, 8)) << _build_bit_shifts(AWQ_ORDER)
            return words.sum(-1, dtype=torch.int32)
        words = pack_pairs(codes)
        words = words if self._format.name == "NVFP4" else words.view(torch.int32)
        return words.mT.contiguous() if self._by_column else words

    def _read_part(self, part: str, name: str, index: int | None = None) -> Tensor:
        """Read one part of a packed weight as [O, ...]; the column order as [1, I].

        Codes, zero points and e4m3 scales are returned as uint8.
        """
        layout, path, format_ = self.layouts[name], name.removesuffix(".weight"), self._format
        shape, dtype = layout.sections()[part]
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        raw = self._files.read(f"{path}.{self._parts[part]}")
        if part == "order":
            return raw.to(torch.int32).view(1, -1)
        if part == "codes":
            unordered, name = torch.arange(layout.cols) // layout.group, f"{path}.{self._parts['order']}"
            if name in self._shapes and not (layout.has_order or torch.equal(self._files.read(name).long(), unordered)):
                raise UserError(f"{self._setting}: {name} is not ascending, contrary to config.json; {SAME_MODEL_FIX}")
            if format_.name == "AWQ":
                return pack_pairs(unpack_codes(raw, AWQ_ORDER).mT)
        elif part == "zeros":
            order = AWQ_ORDER if format_.name == "AWQ" else range(8)
            zeros = unpack_codes(raw if self._by_column else raw.mT, order)
            return (zeros.mT[: layout.rows] + format_.offset & 15).contiguous()
        elif part == "divisors":
            return raw.float().expand(layout.rows, 1)
        value = (raw.mT if self._by_column else raw).contiguous()
        return value if part == "scales" and not layout.is_float else value.view(torch.uint8)

    def _find_layout(self, path: str) -> GroupedLayout:
        """Derive the layout of a layer from its parts. Raises UserError if their shapes or types do not match."""
        format_, is_float = self._format, self._format.name == "NVFP4"
        first, second, *_ = (*self._shapes[f"{path}.{self._parts['codes']}"], 0, 0)
        columns = {"GPTQ": (second, 8 * first), "AWQ": (8 * second, first)}
        rows, cols = columns.get(format_.name, (first, (2 if is_float else 8) * second))
        count = -(-cols // (format_.group or max(1, cols)))
        scales_shape = (count, rows) if self._by_column else (rows, count)
        zeros_shape = (count, rows // 8) if self._by_column else (-(-rows // 8), count)
        expected: dict[str, tuple[Shape, Sequence[str]]] = {
            "codes": ((first, second), ["U8"] if is_float else ["I32"]),
            "scales": (scales_shape, SCALE_TYPES[3:] if is_float else SCALE_TYPES[:3]),
            **({"zeros": (zeros_shape, ["I32"])} if format_.has_zeros else {}),
            **({"order": ((cols,), ["I32"])} if format_.has_order else {}),
            **({"divisors": ((1,), ["F32"])} if is_float else {}),
        }
        for part, (shape, types) in expected.items():
            name = f"{path}.{self._parts[part]}"
            if name not in self._shapes:
                raise UserError(f"{self._setting}: {name} is missing; download the model again")
            if self._shapes[name] != shape or self._types[name] not in types:
                raise UserError(
                    f"{self._setting}: {name} has shape {self._shapes[name]} in {self._types[name]}, but "
                    f"{format_.name} in groups of {format_.group or cols} needs {shape} in {types[0]}; {SAME_MODEL_FIX}"
                )
        return format_.build_layout((rows, cols), SCALE_TYPES.index(self._types[f"{path}.{self._parts['scales']}"]))


def _build_bit_shifts(order: Sequence[int]) -> Tensor:
    return torch.tensor([4 * position for position in order], dtype=torch.int32)


def unpack_codes(words: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """Unpack int32 [N, K] to 4-bit codes [N, 8 K] (uint8). `order` lists the positions of 8 adjacent columns."""
    return (words[..., None] >> _build_bit_shifts(order) & 15).to(torch.uint8).flatten(-2)


def pack_pairs(codes: Tensor) -> Tensor:
    """Pack codes [..., I] into bytes [..., I/2], the first of each pair in the low bits."""
    return codes[..., ::2] | codes[..., 1::2] << 4
