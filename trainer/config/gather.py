"""How stage 3 gathers the frozen base: per layer by our code, or parameter by parameter by DeepSpeed."""

from pathlib import Path
from typing import Any

from trainer.config.adapter_settings import FILE, read_adapter_settings
from trainer.config.sections import RunConfig
from trainer.config.training_sections import ZeroSection


def gathers_by_layer(config: RunConfig) -> bool:
    """True if the base is cut and gathered per layer, and DeepSpeed's engine runs at stage 2 on the adapter."""
    return config.zero.stage == 3 and config.zero.gather != "module" and why_not_by_layer(config) is None


def engine_zero(config: RunConfig) -> ZeroSection:
    """The settings of ZeRO for DeepSpeed's engine: stage 2 where the base is not its business."""
    if not gathers_by_layer(config):
        return config.zero
    return config.zero.model_copy(update={"stage": 2, "offload_parameters": False})


def engine_stage(config: RunConfig) -> int:
    """The ZeRO stage at which DeepSpeed's engine runs."""
    return engine_zero(config).stage


def why_not_by_layer(config: RunConfig) -> str | None:
    """Why the base of this run cannot be gathered per layer, or None if it can."""
    if config.adapter == "none":
        return "all weights are trained, and layers are gathered of frozen ones"
    if config.lora.dora or adapter_to_continue(config).get("use_dora"):
        return "DoRA reads every weight whole when it begins"
    if config.lora.adapter_path and not Path(config.lora.adapter_path).is_dir():
        return "the kind of an adapter on the hub is not known before it is loaded"
    if "zero_optimization" in config.zero.extra:
        return "zero.extra sets DeepSpeed's own stage 3"
    return None


def trained_in_full(config: RunConfig) -> tuple[str, ...]:
    """Names of the modules that the adapter trains and saves in full."""
    return config.lora.modules_to_save or tuple(adapter_to_continue(config).get("modules_to_save") or ())


def adapter_to_continue(config: RunConfig) -> dict[str, Any]:
    """Return the settings of the adapter at lora.adapter_path; empty if it is not on this machine."""
    folder = Path(config.lora.adapter_path or "")
    return read_adapter_settings(folder) if config.lora.adapter_path and (folder / FILE).is_file() else {}
