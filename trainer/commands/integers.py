"""`zerolora merge --quantize`: write adapted layers for servers, in the integer format they were trained for.

Uses compressed-tensors' `pack-quantized` format, which vLLM, SGLang and transformers load without torchao: for each
layer `weight_packed` (int32, 4 or 8 values each), `weight_scale` in the model's dtype and `weight_shape`. All other
layers are unchanged and listed under `ignore`.
"""

import importlib.util
import sys
from typing import Any

import torch
from torch import Tensor, nn

from ops.fake_quantize import dequantize, quantize_merged_weight
from trainer.commands.export.factors import PEFT_PREFIX
from trainer.config import UserError
from trainer.model.integer_weights import (
    INSTALL_COMMAND,
    IntegerFormat,
    IntegerKind,
    check_torchao,
    choose_integer_format,
    explain_unsupported_layer,
    find_adapted_linears,
)


class IntegerMerge:
    """Quantizes the adapted layers of a model before its adapter is merged, and builds the state dict to save."""

    def __init__(self, kind: IntegerKind, dtype: torch.dtype, device: torch.device) -> None:
        """Set the dtype of the model and scales, and the device that computes W + s B A, as in training.

        Raises UserError if torchao or compressed-tensors is missing.
        """
        check_torchao(f"--quantize={kind}")
        if importlib.util.find_spec("compressed_tensors") is None:
            raise UserError(f"--quantize={kind}: compressed-tensors is not installed; run `{INSTALL_COMMAND}`")
        self.kind, self.dtype, self.device = kind, dtype, device
        self._format: IntegerFormat | None = None
        self._layers: dict[str, tuple[Tensor, Tensor]] = {}

    def quantize_adapted_layers(self, adapted: Any) -> None:
        """Replace each adapted W with the quantized W + s B A, and set B to zero.

        Raises UserError if no layer is adapted, or if one cannot be quantized.
        """
        layers = {path.removeprefix(PEFT_PREFIX): layer for path, layer in find_adapted_linears(adapted).items()}
        if not layers:
            raise UserError(f"--quantize={self.kind}: no linear layer has an adapter; merge without --quantize")
        for path, layer in layers.items():
            if reason := explain_unsupported_layer(layer):
                raise UserError(f"--quantize={self.kind}: {path}: {reason}; merge without --quantize")
        widths = {path: layer.base_layer.weight.shape[1] for path, layer in layers.items()}
        self._format = choose_integer_format(self.kind, widths, self.dtype, setting="--quantize")
        self._layers = {path: self._quantize_layer(layer, self._format) for path, layer in layers.items()}

    def _quantize_layer(self, layer: Any, format_: IntegerFormat) -> tuple[Tensor, Tensor]:
        name = layer.active_adapters[0]
        factors = layer.lora_A[name].weight, layer.lora_B[name].weight
        weight: nn.Parameter = layer.base_layer.weight
        base, down, up = (each.detach().to(self.device) for each in (weight.to(self.dtype), *factors))
        merged = quantize_merged_weight(base, down, up, layer.scaling[name], format_.quantize)
        values, scales = (each.cpu() for each in merged)
        weight.data = dequantize(values, scales, self.dtype)
        factors[1].data.zero_()
        return values, scales.to(self.dtype)

    def build_state_dict(self, model: Any) -> dict[str, Tensor]:
        """Return the merged state dict and set the model's `quantization_config`; print a summary to stderr."""
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

        assert self._format is not None, "quantize_adapted_layers() comes first"
        values: dict[str, Tensor] = dict(model.state_dict())
        for path, (codes, scales) in self._layers.items():
            if not torch.isfinite(scales).all():
                problem = f"{path}: merged weights are not finite in {self.dtype}"
                raise RuntimeError(f"{problem}; lower the learning rate, or use --dtype bf16")
            values.pop(f"{path}.weight")
            values[f"{path}.weight_packed"] = pack_to_int32(codes, self._format.bits)
            values[f"{path}.weight_scale"] = scales
            values[f"{path}.weight_shape"] = torch.tensor(codes.shape)
        unquantized = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
        unquantized = [path for path in unquantized if path not in self._layers]
        model.config.quantization_config = _build_quantization_config(self._format, unquantized)
        print(f"{len(self._layers)} layers in {self._format}", file=sys.stderr)
        return values


def _build_quantization_config(format_: IntegerFormat, unquantized: list[str]) -> dict[str, Any]:
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
    )

    grouping = {"strategy": "group", "group_size": format_.group} if format_.group else {"strategy": "channel"}
    weights = QuantizationArgs(num_bits=format_.bits, type="int", symmetric=True, **grouping)
    config = QuantizationConfig(
        config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=weights)},
        format="pack-quantized",
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=unquantized,
    )
    return config.model_dump(mode="json")
