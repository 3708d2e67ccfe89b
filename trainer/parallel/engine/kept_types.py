"""Preserve weights that transformers keeps in fp32 in a 16-bit model, such as a router's biases."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer.contract.known_versions import replaces, require
from trainer.parallel.engine.linear_layers import find_base_model
from trainer.parallel.engine.partitioned import exclude_from_broadcast, is_partitioned


def find_fp32_names(model: Any, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Return a pattern for the names of weights that `from_pretrained` keeps in fp32 in a `dtype` model, or None."""
    base = find_base_model(model)
    if not hasattr(base, "_keep_in_fp32_modules_strict"):
        return None  # not a transformers model
    names = require(base, "_get_dtype_plan", "transformers")(dtype)
    return re.compile("|".join(name.replace("*", ".*") for name in names)) if names else None


def convert_fp32_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert parameters and buffers of a model on the meta device to fp32 where `from_pretrained` would."""
    if (pattern := find_fp32_names(model, dtype)) is None:
        return
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if pattern.search(f"{path}.{name}"):
                parameter.data = parameter.data.float()
        for name, buffer in module.named_buffers(recurse=False):
            if pattern.search(f"{path}.{name}"):
                module._buffers[name] = buffer.float()


@replaces("the dtype of frozen fp32 weights")
@contextmanager
def keep_frozen_dtypes(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Hide frozen fp32 weights from DeepSpeed's engine, which converts all parameters to its own dtype."""
    pattern = find_fp32_names(model, dtype)
    hidden = [
        (parameter, parameter.data)
        for name, parameter in model.named_parameters()
        if pattern and pattern.search(name) and not parameter.requires_grad and not is_partitioned(parameter)
    ]
    for parameter, data in hidden:
        exclude_from_broadcast(parameter)
        parameter.data = torch.empty(0, dtype=dtype, device=data.device)
    try:
        yield
    finally:
        for parameter, data in hidden:
            parameter.data = data
