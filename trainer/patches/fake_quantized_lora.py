"""Compute adapted layers with fake-quantized merged weights (training.qat).

ops/fake_quantize.py contains the arithmetic, including dropout. If adapters are disabled or merged,
PEFT's forward runs without fake quantization. The base model in `eval --base` and in the SCU's KL
divergence is therefore not fake-quantized.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ops.fake_quantize import fake_quantize_linear
from trainer.config import UserError
from trainer.contract.known_versions import replaces, require
from trainer.model.integer_weights import (
    IntegerFormat,
    IntegerKind,
    check_torchao,
    choose_integer_format,
    explain_unsupported_layer,
    find_adapted_linears,
)
from trainer.parallel.engine.partitioned import get_full_shape
from trainer.patches.replace import replace


@replaces("the forward of PEFT's LoRA layers, with rounding")
def install_fake_quantization(model: nn.Module, kind: IntegerKind, dtype: torch.dtype) -> list[str]:
    """Make adapted layers fake-quantize their merged weights in each forward pass; return lines for the console.

    Raises UserError if torchao is missing or a layer cannot be quantized.
    """
    from peft.tuners.lora import LoraLayer

    setting = f"training.qat={kind}"
    check_torchao(setting)
    for path, layer in model.named_modules():
        if isinstance(layer, LoraLayer) and (reason := explain_unsupported_layer(layer)):
            raise UserError(f"{setting}: {path}: {reason}; exclude it with lora.exclude_modules")
    layers = find_adapted_linears(model)
    widths = {path: get_full_shape(layer.base_layer.weight)[1] for path, layer in layers.items()}
    format_ = choose_integer_format(kind, widths, dtype, setting=setting)
    for layer in layers.values():
        replace(layer, "forward", _build_forward(layer, format_))
    return [f"fake-quantized: the merged weights of {len(layers)} adapted layers ({format_}); no other layer changes"]


def _build_forward(layer: Any, format_: IntegerFormat) -> Callable[..., Tensor]:
    for name in ("_disable_adapters", "_active_adapter"):
        require(layer, name, "peft")
    peft_forward, adapter = layer.forward, layer.active_adapters[0]
    active = (adapter, [adapter])  # PEFT stores a name or a list
    down_module, up_module, dropout = layer.lora_A[adapter], layer.lora_B[adapter], layer.lora_dropout[adapter]
    base, quantize = layer.base_layer, format_.quantize

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        is_active = not layer._disable_adapters and not layer.merged_adapters and layer._active_adapter in active
        if args or kwargs or not is_active:
            return peft_forward(x, *args, **kwargs)
        down, up, scale = down_module.weight, up_module.weight, layer.scaling[adapter]
        converted = x.to(base.weight.dtype)
        p = float(getattr(dropout, "p", 0.0)) if dropout.training else 0.0
        return fake_quantize_linear(converted, base.weight, base.bias, down, up, scale, quantize, p).to(x.dtype)

    return forward
