"""The 8-bit moments of bitsandbytes: bytes, and a scale for each block of 256 elements of a partition.

Quantising them again changes them: the signed code book has 1 but no -1, so a block with a negative largest element
gets a different scale.
"""

from typing import Any

import torch

from trainer.config import OPTIMIZERS

# bitsandbytes' names of the two 8-bit moments, their scales and code books; a scale covers 256 elements.
EIGHT_BIT = (("state1", "absmax1", "qmap1"), ("state2", "absmax2", "qmap2"))
EIGHT_BIT_BLOCK = 256


def elements_per_buffer(optimizer: str, world_size: int) -> int:
    """Return the multiple to round a flat buffer up to, so that no block of 8-bit moments spans two ranks."""
    return EIGHT_BIT_BLOCK * world_size if OPTIMIZERS[optimizer].bits == 8 else 1


def dequantised(values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return code x scale, fp32."""
    scale_of_each = scales.repeat_interleave(EIGHT_BIT_BLOCK)[: values.numel()]
    return codes[values.reshape(-1).long()] * scale_of_each


def requantise(entry: dict[str, Any], names: tuple[str, str, str], dense: torch.Tensor) -> None:
    """Write 32-bit moments into an 8-bit entry."""
    from bitsandbytes.functional import quantize_blockwise

    values, scale, codes = (entry[name] for name in names)
    packed, found = quantize_blockwise(dense, code=codes, blocksize=EIGHT_BIT_BLOCK)
    values.copy_(packed.view_as(values))
    scale.copy_(found.absmax)
