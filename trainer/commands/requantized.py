"""Requantization of a merged model with experts in MXFP4, with the error it causes."""

import sys
from typing import Any

import torch
from torch import Tensor

from trainer.config import RunConfig
from trainer.model import mxfp4
from trainer.model.base import load_model_config
from trainer.model.model_kind import is_mxfp4
from trainer.model.stored_layout import BLOCKS, SCALES, stored_layout
from trainer.model.tensor_files import SafetensorsFiles


def requantize_mxfp4(model: Any, config: RunConfig) -> dict[str, Tensor] | None:
    """Return the merged state dict in MXFP4 and set `quantization_config`; None if the base is not in MXFP4.

    Prints the rounding error next to the change by the adapter, as root mean squares over all experts.
    """
    stored_config = load_model_config(config.base_model, config.model)
    if not is_mxfp4(stored_config):
        return None
    files = SafetensorsFiles(config.base_model, config.model)
    values: dict[str, Tensor] = dict(model.state_dict())
    size = changed = lost = 0.0
    for name, stored in stored_layout(model, files, config.base_model).items():
        if not stored.is_mxfp4:
            continue
        merged = values.pop(name)
        parts: dict[str, list[Tensor]] = {BLOCKS: [], SCALES: []}
        for index in range(len(merged)):
            blocks, scales = (files.read(stored.names[part][0], index)[0] for part in (BLOCKS, SCALES))
            base = mxfp4.dequantized(blocks, scales, torch.float32).view(merged.shape[2], merged.shape[1])
            wanted = merged[index].t().float()
            after = mxfp4.quantized(wanted) if not torch.equal(wanted, base) else (blocks, scales)
            written = mxfp4.dequantized(*after, torch.float32).view_as(wanted)
            size += float(wanted.square().sum())
            changed += float((wanted - base).square().sum())
            lost += float((written - wanted).square().sum())
            for part, value in zip((BLOCKS, SCALES), after, strict=True):
                parts[part].append(value)
        values |= {name + part: torch.stack(each) for part, each in parts.items()}
    model.config.quantization_config = stored_config.quantization_config
    print(_describe_error(changed, lost, size), file=sys.stderr)
    return values


def _describe_error(changed: float, lost: float, size: float) -> str:
    if not changed:
        return "experts: unchanged, in MXFP4"
    return (
        f"experts: requantized to MXFP4, as in the base: rounding changes the merged weights by "
        f"{(lost / size) ** 0.5:.2%} of their size, the adapter by {(changed / size) ** 0.5:.2%}; --dtype bf16 writes "
        "them unrounded"
    )
