"""Check, dequantize and quantize experts stored in MXFP4 (gpt-oss).

MXFP4 (OCP Microscaling Formats v1.0): blocks of 32 4-bit values with one 8-bit exponent. A model's tensor X
[experts, in, out] is stored as X_blocks [experts, out, in / 32, 16] and X_scales [experts, out, in / 32].
"""

import copy
import re
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ops import reference
from ops.reference import FP4_VALUES
from trainer.config import UserError
from trainer.model.stored_layout import BLOCKS, SCALES

MXFP4 = "mxfp4"
BLOCK = 32
_BIAS = 127
_LARGEST_EXPONENT = 2  # exponent of the largest FP4 value, 6 = 1.5 x 2^2
UNIFORM_FIX = "use a checkpoint that stores all experts in MXFP4, or one in full precision"
Shapes = dict[str, tuple[int, ...]]


def dequantize(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values v 2^(e - 127) as [blocks, 32], given uint8 tensors with 16 bytes of codes per exponent.

    The low bits of each byte are the first of its two codes.
    """
    values = reference.dequantize_mxfp4(codes.reshape(-1, BLOCK // 2), exponents.reshape(-1), dtype)
    return values.view(-1, BLOCK)


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [..., n] to blocks [..., n / 32, 16] and scales [..., n / 32].

    The scale's exponent is the exponent of the block's largest magnitude minus 2, the exponent of FP4's largest value
    (specification, section 6.3). It is one higher if that magnitude would be clipped by more than half a step. Values
    are rounded to nearest, ties to even. Quantizing dequantized MXFP4 reproduces its values exactly.
    """
    in_blocks = values.to(torch.float32).unflatten(-1, (-1, BLOCK))
    largest = in_blocks.abs().amax(-1)
    exponent = torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT
    exponent = torch.where(torch.ldexp(largest, -exponent) > 7.0, exponent + 1, exponent)
    exponent = torch.where(largest > 0, exponent, -_BIAS).clamp(-_BIAS, _BIAS)
    pairs = round_to_codes(torch.ldexp(in_blocks, -exponent[..., None])).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, (exponent + _BIAS).to(torch.uint8)


def round_to_codes(values: Tensor) -> Tensor:
    """Return the code (uint8) of the nearest E2M1 number, with ties to the even code."""
    magnitude = values.abs()
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for index, (low, high) in enumerate(pairwise(FP4_VALUES)):
        middle = (low + high) / 2
        code += (magnitude > middle) if index % 2 == 0 else (magnitude >= middle)
    return torch.where(torch.signbit(values), code + 8, code)


def strip_quantization(model_config: Any) -> Any:
    plain = copy.deepcopy(model_config)
    for part in (plain, plain.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return plain


def read_mxfp4_shapes(setting: str, stored: Shapes, *, declared: bool) -> Shapes:
    """Return the dequantized shape of each tensor by name.

    `declared` is whether config.json declares MXFP4 experts. Raises UserError if the files contradict it, if
    only some experts are in MXFP4, or if blocks or scales are missing or do not match.
    """
    packed = {name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)}
    packed |= {name.removesuffix(SCALES) for name in stored if name.endswith(SCALES) and declared}
    if not packed and declared:
        fix = "remove quantization_config from config.json"
        raise UserError(f"{setting}: config.json says mxfp4, but no tensor is in that format; {fix}")
    if packed and not declared:
        fix = "use config.json from the same model"
        raise UserError(f"{setting}: {min(packed)} is stored in MXFP4, but config.json does not declare it; {fix}")
    shapes = {name: shape for name, shape in stored.items() if not name.endswith((BLOCKS, SCALES))}
    kinds = {_mask_layer_index(name) for name in packed}
    mixed = sorted(name for name in shapes if _mask_layer_index(name) in kinds)
    if mixed:
        raise UserError(f"{setting}: {mixed[0]} is not stored in MXFP4, unlike other layers; {UNIFORM_FIX}")
    for name in sorted(packed):
        blocks, scales = stored.get(name + BLOCKS), stored.get(name + SCALES)
        if blocks is None or scales is None:
            missing = name + (SCALES if scales is None else BLOCKS)
            raise UserError(f"{setting}: {missing} is missing; download the model again")
        if "expert" not in name or len(blocks) != 4:
            raise UserError(f"{setting}: {name} is stored in MXFP4, but is not an expert; {UNIFORM_FIX}")
        if blocks[3] * 2 != BLOCK or blocks[:3] != scales:
            raise UserError(
                f"{setting}: {name}{BLOCKS} has shape {blocks} and {name}{SCALES} {scales}, which do not form blocks "
                f"of {BLOCK}; download the model again"
            )
        shapes[name] = (blocks[0], blocks[2] * BLOCK, blocks[1])
    return shapes


def _mask_layer_index(name: str) -> str:
    return re.sub(r"\.\d+\.", ".N.", name)
