"""Checkpoints whose experts are stored in MXFP4 (gpt-oss): what is in them, what it stands for, and writing it again.

MXFP4 (OCP Microscaling Formats v1.0): blocks of 32 values of 4 bits with one exponent of 8 bits. A tensor X of a model,
[experts, in, out], is stored as X_blocks [experts, out, in / 32, 16] and X_scales [experts, out, in / 32].
"""

import copy
import re
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from trainer.config import UserError
from trainer.model.stored_layout import BLOCKS, SCALES

MXFP4 = "mxfp4"
BLOCK = 32
# Sign, two bits of exponent, one of mantissa: the values of FP4 (E2M1).
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BIAS = 127
_LARGEST_EXPONENT = 2  # of FP4's values: 6 is 1.5 x 2^2
ALIKE = "take a checkpoint that stores all experts alike, or one in full precision"
Shapes = dict[str, tuple[int, ...]]


def dequantized(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """v 2^(e - 127) in blocks of 32, [blocks, 32]; the first of two codes in a byte is in its low bits.

    codes and exponents [blocks] are uint8, of any shape with 16 bytes to an exponent.
    """
    values = torch.tensor(VALUES, dtype=torch.float32, device=codes.device)
    pairs = codes.reshape(-1)
    found = values[torch.stack((pairs & 15, pairs >> 4), dim=1).int()].view(-1, BLOCK)
    return torch.ldexp(found, exponents.reshape(-1, 1).int() - _BIAS).to(dtype)


def quantized(values: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks [..., n / 32, 16] and scales [..., n / 32] of values [..., n]; what was MXFP4 comes back to the bit.

    The exponent is that of the block's largest value less that of FP4's (section 6.3 there), or one more where the
    largest would be cut off by more than half a step; values are rounded to the nearest, ties to the even code.
    """
    in_blocks = values.to(torch.float32).unflatten(-1, (-1, BLOCK))
    largest = in_blocks.abs().amax(-1)
    exponent = torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT
    exponent = torch.where(torch.ldexp(largest, -exponent) > 7.0, exponent + 1, exponent)
    exponent = torch.where(largest > 0, exponent, -_BIAS).clamp(-_BIAS, _BIAS)
    scaled = torch.ldexp(in_blocks, -exponent[..., None])
    magnitude = scaled.abs()
    # Between neighbours: a tie goes to the one whose mantissa bit is 0.
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for index, (low, high) in enumerate(pairwise(VALUES[:8])):
        middle = (low + high) / 2
        code += (magnitude > middle) if index % 2 == 0 else (magnitude >= middle)
    code = torch.where(torch.signbit(scaled), code + 8, code)
    pairs = code.unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, (exponent + _BIAS).to(torch.uint8)


def full_precision(model_config: Any) -> Any:
    """The configuration of the same model with nothing quantised."""
    plain = copy.deepcopy(model_config)
    for part in (plain, plain.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return plain


def unpacked_shapes(setting: str, stored: Shapes, *, announced: bool) -> Shapes:
    """Shapes by name as they would be in full precision; `announced`: config.json says that experts are in MXFP4.

    Raises UserError where some experts are stored in another way, or half of a tensor is missing.
    """
    packed = {name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)}
    packed |= {name.removesuffix(SCALES) for name in stored if name.endswith(SCALES) and announced}
    if not packed and announced:
        raise UserError(
            f"{setting}: config.json says mxfp4 and no stored tensor is; remove quantization_config from config.json"
        )
    if packed and not announced:
        raise UserError(
            f"{setting}: {min(packed)} is stored in MXFP4 and config.json does not say so; take config.json from the "
            "same model"
        )
    found = {name: shape for name, shape in stored.items() if not name.endswith((BLOCKS, SCALES))}
    kinds = {_any_layer(name) for name in packed}
    mixed = sorted(name for name in found if _any_layer(name) in kinds)
    if mixed:
        raise UserError(f"{setting}: {mixed[0]} is not stored in MXFP4 as those of other layers are; {ALIKE}")
    for name in sorted(packed):
        blocks, scales = stored.get(name + BLOCKS), stored.get(name + SCALES)
        if blocks is None or scales is None:
            lost = name + (SCALES if scales is None else BLOCKS)
            raise UserError(f"{setting}: {lost} is in none of its files; download it again")
        if "expert" not in name or len(blocks) != 4:
            raise UserError(f"{setting}: {name} is stored in MXFP4 and is no expert's; {ALIKE}")
        if blocks[3] * 2 != BLOCK or blocks[:3] != scales:
            raise UserError(
                f"{setting}: {name}{BLOCKS} has shape {blocks} and {name}{SCALES} {scales}, which are no blocks of "
                f"{BLOCK}; download it again"
            )
        found[name] = (blocks[0], blocks[2] * BLOCK, blocks[1])
    return found


def _any_layer(name: str) -> str:
    return re.sub(r"\.\d+\.", ".N.", name)
