"""Checkpoints with linear layers in 4 bits: GPTQ, AWQ, and W4A16 and NVFP4 of compressed-tensors.

All have codes with a scale per group of columns, and become the layout of ops/grouped.py for a weight [O, I]:

    GPTQ    X.qweight [I/8, O], X.qzeros [G, O/8] (version 1: less one), X.scales [G, O], X.g_idx [I]
    AWQ     X.qweight [I, O/8] and X.qzeros [G, O/8], of each 8 columns in the order 0 2 4 6 1 3 5 7; X.scales [G, O]
    W4A16   X.weight_packed [O, I/8], X.weight_scale [O, G], X.weight_zero_point [O/8, G], X.weight_g_idx [I]
    NVFP4   X.weight_packed [O, I/2] bytes of E2M1, X.weight_scale [O, G] in e4m3, X.weight_global_scale [1], a divisor

Eight codes are in each int32, the lowest bits first. The files decide which layers are in 4 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ops.grouped import SCALES, GroupedLayout, place_sections
from ops.reference import dequantize_groups
from trainer.config import UserError
from trainer.model.mxfp4 import nearest_codes
from trainer.model.stored_fp8 import (
    CONVERSIONS,
    FOR_SERVING,
    SAME_MODEL,
    TensorView,
    find_quantization_settings,
    matches_module,
)
from trainer.model.stored_layout import Stored
from trainer.model.tensor_files import SafetensorsFiles

COLUMN_PARTS = {"codes": "qweight", "scales": "scales", "zeros": "qzeros", "order": "g_idx"}
PARTS = {"codes": "weight_packed", "scales": "weight_scale", "zeros": "weight_zero_point", "order": "weight_g_idx"}
PARTS |= {"divisors": "weight_global_scale", "shape": "weight_shape"}
"""Names of the stored tensors of a layer by what they become; COLUMN_PARTS in GPTQ and AWQ."""
TYPES = ("F32", "F16", "BF16", "F8_E4M3")
"""SCALES, as safetensors names them."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position in an int32 of each of 8 neighbouring columns."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class FourBitForm:
    """The 4-bit format declared in config.json."""

    name: Literal["GPTQ", "AWQ", "W4A16", "NVFP4"]
    group: int
    """Columns per scale; 0 for one scale per row."""
    zeros: bool
    excluded: tuple[str, ...]
    ordered: bool = False
    """Whether the columns of a group are not neighbours."""
    offset: int = 0
    """What is added to stored zero points, modulo 16."""
    scaled: Literal["groups"] = "groups"

    def holds(self, path: str) -> bool:
        """Return whether the linear layer at `path` is in 4 bits according to config.json."""
        inside = any(part.isdigit() for part in path.split("."))
        is_in = str.__contains__ if self.name == "AWQ" else lambda path, each: matches_module(each, path)
        return inside and not any(is_in(path, each) for each in self.excluded)

    def layout(self, shape: Sequence[int], scale: int | None = None) -> GroupedLayout:
        """Return how a matrix [O, I], or [E, O, I], is packed; `scale` defaults to the usual type of scales."""
        *experts, rows, cols = shape
        floats, group = int(self.name == "NVFP4"), self.group or cols
        scale = TYPES.index("F8_E4M3" if floats else "F16") if scale is None else scale
        flags = floats, int(self.zeros), floats, int(self.ordered)
        return GroupedLayout(next(iter(experts), 0), rows, cols, group, scale, *flags)

    def scale_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a packed weight that are not codes."""
        return place_sections(self.layout(shape).sections())[1] - torch.Size(shape).numel() // 2


def parse_four_bit_form(model_config: Any) -> FourBitForm | str | None:
    """Return the 4-bit format of a checkpoint, or why it is not supported; None for other methods."""
    settings = find_quantization_settings(model_config) or {}
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    if method == "compressed-tensors":
        return _parse_compressed(settings)
    return _parse_columns(settings, method.upper()) if method in ("gptq", "awq") else None


def _parse_columns(settings: dict[str, Any], method: Any) -> FourBitForm | str:
    known = ("gptq", "gptq_v2") if method == "GPTQ" else ("gemm",)
    version = str(next(filter(None, map(settings.get, ("checkpoint_format", "version", "format"))), known[0])).lower()
    version = "marlin" if settings.get("is_marlin_format") else version
    version = "llm-awq" if settings.get("backend") == "llm-awq" else version
    rules: dict[str, dict[str, Any] | None] = settings.get("dynamic") or {}
    bits = {settings.get("bits", settings.get("w_bit")), *((own or {}).get("bits", 4) for own in rules.values())}
    if bits != {4}:
        return f"{' and '.join(sorted(map(str, bits - {4})))} bits, and only 4 are read"
    if version not in known:
        return f"version {version}, and only {' and '.join(known)} are read"
    excluded = settings.get("modules_to_not_convert") or (f"re:{rule[2:]}" for rule in rules if rule.startswith("-:"))
    group, ordered = max(0, settings.get("group_size", 128) or 0), bool(settings.get("desc_act"))
    return FourBitForm(method, group, True, tuple(excluded), ordered, int(version == "gptq"))


def _parse_compressed(settings: dict[str, Any]) -> FourBitForm | str | None:
    groups = [group or {} for group in (settings.get("config_groups") or {}).values()]
    weights: list[dict[str, Any]] = [group.get("weights") or {} for group in groups]
    if not any(each.get("num_bits") == 4 for each in weights):
        return None
    first, excluded = weights[0], tuple(settings.get("ignore") or ())
    strategy, kind, group = first.get("strategy"), first.get("type"), first.get("group_size")
    group = group if isinstance(group, int) and group > 0 else 0
    is_read = strategy == "tensor_group" and group == 16 if kind == "float" else strategy in ("group", "channel")
    faults = {
        "layers of several number types": len({str((each.get("num_bits"), each.get("type"))) for each in weights}) > 1,
        "inputs are quantized too, as in W4A4": any(group.get("input_activations") for group in groups),
        "its weights are sparse": (settings.get("sparsity_config") or {}).get("format", "dense") != "dense",
        "its inputs are rotated (transform_config)": bool(settings.get("transform_config")),
        f"4-bit {kind}s by {strategy} of {group}": not is_read,
    }
    if fault := next((fault for fault, found in faults.items() if found), ""):
        return f"{fault}, and of 4 bits only W4A16 integers by group or channel and NVFP4 are read"
    if kind == "float":
        return FourBitForm("NVFP4", group, False, excluded)
    ordered = str(first.get("actorder")).lower().endswith("group")
    return FourBitForm("W4A16", group, not first.get("symmetric", True), excluded, ordered)


class FourBitFiles:
    """The tensors of a checkpoint in 4 bits: `read` dequantizes them, `fill` copies codes and scales."""

    def __init__(self, files: SafetensorsFiles, form: FourBitForm, setting: str) -> None:
        """Find the packed weights. Raises UserError, beginning with `setting`, if none or parts do not fit."""
        self._files, self._form, self._setting = files, form, setting
        self._shapes, self._types = files.shapes(), files.types()
        self._by_column = form.name in ("GPTQ", "AWQ")
        self._parts = COLUMN_PARTS if self._by_column else PARTS
        codes = f".{self._parts['codes']}"
        paths = [name.removesuffix(codes) for name in self._shapes if name.endswith(codes)]
        self.layouts = {f"{path}.weight": self._find_layout(path) for path in paths}
        parts = {f"{path}.{part}" for path in paths for part in self._parts.values()}
        plain = {name for name in self._shapes if name not in parts and name.rpartition(".")[2] not in FOR_SERVING}
        self._plain = {name: self._shapes[name] for name in plain}
        if not self.layouts:
            raise UserError(
                f"{setting}: config.json says {form.name}, but no tensor is stored in it; remove quantization_config "
                "from config.json"
            )
        for name, shape in self._plain.items():
            if self._types[name].startswith(("F8", "I8", "U8", "I32")) and len(shape) > 1:
                raise UserError(f"{setting}: {name} is stored as {self._types[name]}, which is not part of {form.name}")

    def shapes(self) -> dict[str, Shape]:
        """Return the full-precision shapes of all weights and the shapes of tensors that are not packed."""
        return self._plain | {name: (each.rows, each.cols) for name, each in self.layouts.items()}

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Return a tensor, a packed one as float32; with `index`, that slice of its first dimension."""
        if name not in self.layouts:
            return self._files.read(name, index)
        whole = self._dequantize(self.layouts[name], self._read_parts(name))
        return whole if index is None else whole[index : index + 1]

    def _read_parts(self, name: str) -> dict[str, Tensor]:
        return {part: self._read_part(part, name) for part in self.layouts[name].sections()}

    def _dequantize(self, layout: GroupedLayout, parts: dict[str, Tensor]) -> Tensor:
        own = parts | {"scales": parts["scales"].view(SCALES[layout.scale]), "order": parts["order"].view(-1)}
        return dequantize_groups(list(own.values()), layout.floats, layout.group, torch.float32)

    def find_layout(self, stored: Stored, shape: Sequence[int], *, transposed: bool) -> GroupedLayout | None:
        """Return how a parameter of `shape`, [.., I, O] if transposed, is packed; None if it must be dequantized."""
        names = [name for each in stored.names.values() for name in each]
        kinds = {type(each).__name__: each for each in stored.converter.operations} if stored.converter else {}
        *experts, rows, _ = (*shape[:-2], *reversed(shape[-2:])) if transposed else shape
        layouts = {self.layouts[name]._replace(rows=rows) for name in names if name in self.layouts}
        joined = "Concatenate" not in kinds or kinds["Concatenate"].dim == len(shape) - 2
        alike = len(layouts) == 1 and all(name in self.layouts for name in names)
        if not (alike and joined and set(kinds) <= set(CONVERSIONS) and transposed == ("Transpose" in kinds)):
            return None
        return layouts.pop()._replace(experts=next(iter(experts), 0))

    def fill(self, stored: Stored, sections: dict[str, Tensor], experts: int, *, transposed: bool) -> None:
        """Copy the parts of a parameter to its sections, one expert at a time if possible."""
        for part, section in sections.items():
            section = section.view(torch.uint8) if section.dtype == torch.float8_e4m3fn else section
            view = TensorView(self.shapes, partial(self._read_part, part))
            for index in range(experts) if experts and stored.by_expert else [None]:
                if not section.numel():
                    break
                value = stored.read(view, index)
                value = value.mT if transposed else value
                if part == "order":
                    if not (value == value[..., :1, :]).all():
                        name = self._parts["order"]
                        raise UserError(f"{self._setting}: the parts of {stored.target} differ in {name}")
                    value = value[..., 0, :]
                section[slice(None) if index is None else slice(index, index + 1)] = value

    def requantize(self, name: str, wanted: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the stored parts of the weight nearest to `wanted` [O, I] with the scales of `name`, and values."""
        layout, path, parts = self.layouts[name], name.removesuffix(".weight"), self._read_parts(name)
        order = parts["order"].view(-1) if layout.ordered else torch.arange(layout.cols) // layout.group
        scale = parts["scales"].view(SCALES[layout.scale]).float()
        scale = (scale / parts["divisors"] if layout.divided else scale)[:, order]
        steps = torch.where(scale == 0, 0.0, wanted / scale)
        zero = parts["zeros"][:, order].float() if layout.zeros else 8.0
        codes = nearest_codes(steps) if layout.floats else (steps + zero).round().clamp(0, 15).to(torch.uint8)
        names = [f"{path}.{part}" for part in self._parts.values()]
        found = {each: self._files.read(each) for each in names if each in self._shapes}
        parts["codes"] = pack_pairs(codes)
        found[f"{path}.{self._parts['codes']}"] = self._pack_codes(codes)
        return found, self._dequantize(layout, parts)

    def _pack_codes(self, codes: Tensor) -> Tensor:
        """Return codes [O, I] as they are stored."""
        if self._form.name == "AWQ":
            words = codes.mT.to(torch.int32).unflatten(-1, (-1, 8)) << _bit_shifts(AWQ_ORDER)
            return words.sum(-1, dtype=torch.int32)
        words = pack_pairs(codes)
        words = words if self._form.name == "NVFP4" else words.view(torch.int32)
        return words.mT.contiguous() if self._by_column else words

    def _read_part(self, part: str, name: str, index: int | None = None) -> Tensor:
        """Return a part of a packed weight with the rows of the weight, e4m3 as bytes; of the order, one row."""
        layout, path, form = self.layouts[name], name.removesuffix(".weight"), self._form
        shape, dtype = layout.sections()[part]
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        raw = self._files.read(f"{path}.{self._parts[part]}")
        if part == "order":
            return raw.to(torch.int32).view(1, -1)
        if part == "codes":
            unordered, name = torch.arange(layout.cols) // layout.group, f"{path}.{self._parts['order']}"
            if name in self._shapes and not (layout.ordered or torch.equal(self._files.read(name).long(), unordered)):
                raise UserError(f"{self._setting}: {name} is not in order, but config.json says so; {SAME_MODEL}")
            if form.name == "AWQ":
                return pack_pairs(unpack_codes(raw, AWQ_ORDER).mT)
        elif part == "zeros":
            found = (
                unpack_codes(raw, AWQ_ORDER if form.name == "AWQ" else range(8))
                if self._by_column
                else unpack_codes(raw.mT)
            )
            return (found.mT[: layout.rows] + form.offset & 15).contiguous()
        elif part == "divisors":
            return raw.float().expand(layout.rows, 1)
        value = (raw.mT if self._by_column else raw).contiguous()
        return value if part == "scales" and not layout.floats else value.view(torch.uint8)

    def _find_layout(self, path: str) -> GroupedLayout:
        """Return the layout of a layer, from the shapes and types of its parts. Raises UserError if they do not fit."""
        form, floats = self._form, self._form.name == "NVFP4"
        first, second, *_ = (*self._shapes[f"{path}.{self._parts['codes']}"], 0, 0)
        columns = {"GPTQ": (second, 8 * first), "AWQ": (8 * second, first)}
        rows, cols = columns.get(form.name, (first, (2 if floats else 8) * second))
        count = -(-cols // (form.group or max(1, cols)))
        zeros = (count, rows // 8) if self._by_column else (-(-rows // 8), count)
        wanted: dict[str, tuple[Shape, Sequence[str]]] = {
            "codes": ((first, second), ["U8"] if floats else ["I32"]),
            "scales": ((count, rows) if self._by_column else (rows, count), TYPES[3:] if floats else TYPES[:3]),
            **({"zeros": (zeros, ["I32"])} if form.zeros else {}),
            **({"order": ((cols,), ["I32"])} if form.ordered else {}),
            **({"divisors": ((1,), ["F32"])} if floats else {}),
        }
        for part, (shape, types) in wanted.items():
            name = f"{path}.{self._parts[part]}"
            if name not in self._shapes:
                raise UserError(f"{self._setting}: {name} is in none of its files; download it again")
            if self._shapes[name] != shape or self._types[name] not in types:
                raise UserError(
                    f"{self._setting}: {name} has shape {self._shapes[name]} in {self._types[name]}, but {form.name} "
                    f"in groups of {form.group or cols} needs {shape} in {types[0]}; {SAME_MODEL}"
                )
        return form.layout((rows, cols), TYPES.index(self._types[f"{path}.{self._parts['scales']}"]))


def _bit_shifts(order: Sequence[int]) -> Tensor:
    return torch.tensor([4 * place for place in order], dtype=torch.int32)


def unpack_codes(words: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """Return the 4-bit codes [N, 8 K] of int32 [N, K] as uint8; `order` is the position of each of 8 neighbours."""
    return (words[..., None] >> _bit_shifts(order) & 15).to(torch.uint8).flatten(-2)


def pack_pairs(codes: Tensor) -> Tensor:
    """Return codes [..., I] as bytes [..., I/2] of two neighbours, the first in the low bits."""
    return codes[..., ::2] | codes[..., 1::2] << 4
