"""Quantize weights to 8- and 4-bit integers with torchao, in the format that inference servers read.

int8   one scale per row of a weight
int4   one scale per group of 128, 64 or 32 weights in a row: the largest size that divides the width of every layer

Rounding is symmetric, to values from -128 to 127 (-8 to 7), with the smallest scale that clips no value: the larger of
max(w) / 127 and -min(w) / 128. torchao's fake quantizers divide the largest magnitude by 127.5, which puts it halfway
between two integers in half of the groups; rounding then depends on the last bit of a sum. The scale is first rounded
to the model's dtype, in which it is stored and in which servers multiply.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainer.config import LoraSection, UserError
from trainer.config.errors import to_text
from trainer.model.targets import find_layers_to_adapt, resolve_targets
from trainer.parallel.engine.linear_layers import is_linear

IntegerKind = Literal["int8", "int4"]
BITS: dict[str, int] = {"int8": 8, "int4": 4}
GROUP_SIZES = (128, 64, 32)
"""Group sizes that the kernels of vLLM and SGLang support; smaller groups are more accurate."""
INSTALL_COMMAND = "pip install torchao compressed-tensors"


@dataclass(frozen=True)
class IntegerFormat:
    """An integer format. `group` is the number of weights per scale; None for one scale per row."""

    kind: IntegerKind
    group: int | None
    scale_dtype: torch.dtype

    @property
    def bits(self) -> int:
        return BITS[self.kind]

    def __str__(self) -> str:
        return f"{self.kind}, one scale per {f'{self.group} weights' if self.group else 'row'}"

    def quantize(self, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize fp32 weights to int8 values [O,I] and fp32 scales [O,G]; a NaN weight makes its scale NaN."""
        from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, quantize_affine

        block = (1, self.group or weight_OI.shape[1])
        low, high = -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1
        mapping = MappingType.SYMMETRIC_NO_CLIPPING_ERR
        # By default torchao clamps scales to at least the dtype's epsilon: 2^-7 in bf16, more than most weights.
        min_scale = torch.finfo(torch.float32).eps
        exact_scales, zero = choose_qparams_affine(
            weight_OI, mapping, block, torch.int8, low, high, min_scale, torch.float32, torch.int32
        )
        scales = exact_scales.to(self.scale_dtype).float()
        values = quantize_affine(weight_OI, block, scales, zero, torch.int8, low, high)
        return values, scales.view(len(weight_OI), -1)


def choose_integer_format(
    kind: IntegerKind, widths: Mapping[str, int], dtype: torch.dtype, *, setting: str
) -> IntegerFormat:
    """Choose the integer format for layers with these input widths; its scales are stored in `dtype`.

    Raises UserError, naming `setting`, if no group size divides the width of a layer.
    """
    if kind == "int8":
        return IntegerFormat(kind, None, dtype)
    for group in GROUP_SIZES:
        if all(width % group == 0 for width in widths.values()):
            return IntegerFormat(kind, group, dtype)
    name, width = next((name, width) for name, width in widths.items() if width % GROUP_SIZES[-1])
    last = name.rpartition(".")[2]
    fix = f"use int8, or exclude it with lora.exclude_modules: [{last}]"
    raise UserError(f"{setting}=int4: the input width {width} of {name} is not a multiple of {GROUP_SIZES[-1]}; {fix}")


def check_integer_targets(model: Any, lora: LoraSection, kind: IntegerKind) -> None:
    setting = f"training.qat={kind}"
    targets = resolve_targets(model, lora)
    if targets is not None and targets.experts:
        raise UserError(
            f"{setting}: {type(model).__name__} has experts, which cannot be quantized; set lora.experts: false"
        )
    if targets is not None and targets.others:
        raise UserError(
            f"{setting}: quantizes only linear layers; remove lora.target_parameters={to_text(lora.target_parameters)}"
        )
    modules = dict(model.named_modules())
    layers = {path: modules[path] for path in find_layers_to_adapt(model, lora)}
    if unsupported := next((path for path, module in layers.items() if not is_linear(module)), None):
        raise UserError(
            f"{setting}: {unsupported} is {type(layers[unsupported]).__name__}, not a plain linear layer; exclude "
            f"it with lora.exclude_modules: [{unsupported.rpartition('.')[2]}]"
        )
    choose_integer_format(
        kind, {path: layer.weight.shape[1] for path, layer in layers.items()}, torch.float32, setting="training.qat"
    )


def find_adapted_linears(model: nn.Module) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, LoraLayer) and is_linear(module.base_layer)
    }


def explain_unsupported_layer(layer: Any) -> str | None:
    """Return why the merged weight W + s B A of an adapted layer cannot be quantized to integers; None if it can."""
    names = layer.active_adapters
    if not is_linear(layer.base_layer):
        return f"{type(layer.base_layer).__name__} is not a plain linear layer"
    if len(names) != 1 or names[0] not in layer.lora_A:
        return f"{len(names)} active adapters instead of one"
    if layer.lora_variant.get(names[0]) is not None:
        return "DoRA scales the merged weight"
    return "the adapter has a bias" if layer.lora_bias.get(names[0]) else None


def check_torchao(setting: str) -> None:
    if importlib.util.find_spec("torchao") is None:
        raise UserError(f"{setting}: needs torchao, which is not installed; run `{INSTALL_COMMAND}`")
