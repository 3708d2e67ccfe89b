"""Check settings against a base model that is stored in FP8 or 4 bits."""

from typing import Any

from trainer.config import RunConfig, UserError
from trainer.config.zero import gathers_per_layer
from trainer.model.stored_four_bit import FourBitFormat, parse_four_bit_format
from trainer.model.stored_fp8 import Fp8Format, parse_fp8_format
from trainer.parallel.engine.linear_layers import is_linear

StoredFormat = Fp8Format | FourBitFormat


def find_stored_format(model_config: Any) -> StoredFormat | None:
    format_ = parse_fp8_format(model_config) or parse_four_bit_format(model_config)
    return None if isinstance(format_, str) else format_


def check_settings_fit(config: RunConfig, model_config: Any) -> None:
    format_ = find_stored_format(model_config)
    if format_ is None:
        return
    lora, kind = config.lora, config.quantization.quant_type
    fp8_option = "or quantization.quant_type: fp8, " * isinstance(format_, Fp8Format)
    stored = f"{config.base_model}, which is stored in {format_.name}"
    faults = {
        f"quantization.quant_type={kind}: {config.base_model} is already stored in {format_.name}; use adapter: lora, "
        f"{fp8_option}or the 16-bit model": config.adapter == "qlora" and not (fp8_option and kind == "fp8"),
        f"training.qat={config.training.qat}: does not support {stored}; use the 16-bit model": (
            config.training.qat is not None
        ),
        f"zero.offload_parameters=true: zero.gather=module cannot offload {stored}; use zero.gather: layer, or set "
        "offload_parameters: false": config.zero.offload_parameters and not gathers_per_layer(config),
        f"{'lora.dora=true' if lora.dora else f'lora.init={lora.init}'}: does not support {stored}; remove the "
        "setting, or use the 16-bit model": lora.dora or lora.init not in ("default", "gaussian", "orthogonal"),
    }
    for fault, applies in faults.items():
        if applies:
            raise UserError(fault)


def check_saved_modules(config: RunConfig, model_config: Any, empty: Any) -> None:
    """Raise UserError if lora.modules_to_save names a layer with a 4-bit or 8-bit weight."""
    format_, head = find_stored_format(model_config), empty.get_output_embeddings()
    for path, module in empty.named_modules() if format_ or config.adapter == "qlora" else ():
        is_packed = is_linear(module) and module is not head and (format_ is None or format_.is_quantized(path))
        for name in config.lora.modules_to_save if is_packed else ():
            if f".{name}." in f".{path}.":
                state = f"stored in {format_.name}" if format_ else f"quantized to {config.quantization.quant_type}"
                raise UserError(
                    f"lora.modules_to_save={name}: the weight of {path} is {state} and cannot be trained; remove it "
                    f"from modules_to_save, or use the 16-bit model{'' if format_ else ' with adapter: lora'}"
                )
