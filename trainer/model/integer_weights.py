"""Whole numbers of 8 or 4 bits for weights, as servers hold them: which scales there are, and torchao's rounding.

int8   one scale for each row of a weight
int4   one for each 128 neighbours of a row, or 64, or 32: the most that divide every weight of the model

Weights alone are rounded, symmetrically to values from -128 to 127 (-8 to 7), with the least scale that cuts none off:
the larger of max(w) / 127 and -min(w) / 128. torchao's fake quantisers divide the largest magnitude by 127.5 instead,
which puts it on the edge between two values in half of the groups: the last bit of a sum then decides between them.
The scale is rounded to the number format of the model first, for it is stored in that, and servers multiply in that.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainer.config import LoraSection, UserError
from trainer.config.errors import shown
from trainer.model.targets import layers_to_adapt, targets_of
from trainer.parallel.engine.linear_layers import is_linear

Integers = Literal["int8", "int4"]
BITS: dict[str, int] = {"int8": 8, "int4": 4}
GROUPS = (128, 64, 32)
"""Weights that share a scale, of those that vLLM's and SGLang's kernels take; fewer are nearer to the weights."""
INSTALL = "pip install 'zerolora[qat]'"


@dataclass(frozen=True)
class IntegerForm:
    """How a weight is rounded: its bits, the neighbours that share a scale (None: a whole row), the scales' type."""

    kind: Integers
    group: int | None
    scale_dtype: torch.dtype

    @property
    def bits(self) -> int:
        """Of a value."""
        return BITS[self.kind]

    def __str__(self) -> str:
        return f"{self.kind}, a scale for each {f'{self.group} weights' if self.group else 'row'}"

    def quantise(self, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        """Values [O,I] in int8 and scales [O,G] in 32 bits, of weights in 32 bits; a NaN makes its scale NaN."""
        from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, quantize_affine

        block = (1, self.group or weight_OI.shape[1])
        low, high = -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1
        mapping = MappingType.SYMMETRIC_NO_CLIPPING_ERR
        # torchao's own least scale is that of the type: 2^-7 in bf16, more than most weights.
        least = torch.finfo(torch.float32).eps
        found, zero = choose_qparams_affine(
            weight_OI, mapping, block, torch.int8, low, high, least, torch.float32, torch.int32
        )
        scales = found.to(self.scale_dtype).float()
        values = quantize_affine(weight_OI, block, scales, zero, torch.int8, low, high)
        return values, scales.view(len(weight_OI), -1)


def form_of(kind: Integers, widths: Mapping[str, int], dtype: torch.dtype, *, setting: str) -> IntegerForm:
    """The form for layers of these widths (what each reads) in a model of that type.

    Raises UserError, naming `setting`, where no group divides a layer's width.
    """
    if kind == "int8":
        return IntegerForm(kind, None, dtype)
    for group in GROUPS:
        if all(width % group == 0 for width in widths.values()):
            return IntegerForm(kind, group, dtype)
    name, width = next((name, width) for name, width in widths.items() if width % GROUPS[-1])
    last = name.rpartition(".")[2]
    raise UserError(
        f"{setting}=int4: {name} reads {width} values, and groups of {GROUPS[-1]} or more do not divide them; use "
        f"int8, or leave it out with lora.exclude_modules: [{last}]"
    )


def check_rounded(model: Any, lora: LoraSection, kind: Integers) -> None:
    """Raise UserError, before a weight is loaded, where what `lora` adapts has no integer form; the model is empty."""
    setting = f"training.qat={kind}"
    targets = targets_of(model, lora)
    if targets is not None and targets.experts:
        raise UserError(
            f"{setting}: {type(model).__name__} has experts, which are not rounded; set lora.experts: false"
        )
    if targets is not None and targets.others:
        raise UserError(
            f"{setting}: rounds linear layers, not lora.target_parameters={shown(lora.target_parameters)}; remove them"
        )
    modules = dict(model.named_modules())
    layers = {path: modules[path] for path in layers_to_adapt(model, lora)}
    if odd := next((path for path, module in layers.items() if not is_linear(module)), None):
        raise UserError(
            f"{setting}: {odd} is {type(layers[odd]).__name__}, no plain linear layer; leave it out with "
            f"lora.exclude_modules: [{odd.rpartition('.')[2]}]"
        )
    form_of(
        kind, {path: layer.weight.shape[1] for path, layer in layers.items()}, torch.float32, setting="training.qat"
    )


def adapted_linears(model: nn.Module) -> dict[str, Any]:
    """PEFT's layers on plain linear layers, by their paths."""
    from peft.tuners.lora import LoraLayer

    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, LoraLayer) and is_linear(module.base_layer)
    }


def why_not_rounded(layer: Any) -> str | None:
    """Why an adapted layer's merged weight cannot be W + s B A in whole numbers, or None if it can."""
    names = layer.active_adapters
    if not is_linear(layer.base_layer):
        return f"{type(layer.base_layer).__name__} is no plain linear layer"
    if len(names) != 1 or names[0] not in layer.lora_A:
        return f"{len(names)} active adapters, not one"
    if layer.lora_variant.get(names[0]) is not None:
        return "DoRA scales the merged weight"
    return "the adapter has a bias of its own" if layer.lora_bias.get(names[0]) else None


def check_torchao(setting: str) -> None:
    """Raise UserError where torchao, which rounds, is not installed."""
    if importlib.util.find_spec("torchao") is None:
        raise UserError(f"{setting}: rounds by torchao, which is not installed; {INSTALL}")
