"""The gather of the frozen base at stage 3: per layer by our code, or per parameter by DeepSpeed."""

from pathlib import Path
from typing import Any

from trainer.config.adapter_settings import FILE, read_adapter_settings
from trainer.config.sections import RunConfig
from trainer.config.training_sections import ZeroSection


def gathers_by_layer(config: RunConfig) -> bool:
    """Return whether the base is sharded and gathered per layer, with DeepSpeed's engine at stage 2 for the adapter."""
    return config.zero.stage == 3 and config.zero.gather != "module" and why_not_by_layer(config) is None


def engine_zero(config: RunConfig) -> ZeroSection:
    """Return the ZeRO settings for DeepSpeed's engine: stage 2 if our code gathers the base."""
    if not gathers_by_layer(config):
        return config.zero
    return config.zero.model_copy(update={"stage": 2, "offload_parameters": False})


def engine_stage(config: RunConfig) -> int:
    """Return the ZeRO stage of DeepSpeed's engine."""
    return engine_zero(config).stage


def why_not_by_layer(config: RunConfig) -> str | None:
    """Return why the base of this run cannot be gathered per layer, or None if it can."""
    if config.adapter == "none":
        return "only frozen weights are gathered by layer, and all are trained"
    if config.lora.dora or read_initial_adapter(config).get("use_dora"):
        return "DoRA needs unpartitioned weights for its initialization"
    if config.lora.adapter_path and not Path(config.lora.adapter_path).is_dir():
        return "the type of an adapter on the hub is unknown before it is loaded"
    if "zero_optimization" in config.zero.extra:
        return "zero.extra sets DeepSpeed's own stage 3"
    return None


def trained_in_full(config: RunConfig) -> tuple[str, ...]:
    """Return the names of the modules that the adapter trains and saves in full."""
    return config.lora.modules_to_save or tuple(read_initial_adapter(config).get("modules_to_save") or ())


def read_initial_adapter(config: RunConfig) -> dict[str, Any]:
    """Return the settings of the adapter at lora.adapter_path; empty if it is not on this machine."""
    folder = Path(config.lora.adapter_path or "")
    return read_adapter_settings(folder) if config.lora.adapter_path and (folder / FILE).is_file() else {}
