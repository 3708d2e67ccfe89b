"""Decide whether zerolora or DeepSpeed gathers the base model at stage 3, and check `zero.extra`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.config.adapter_settings import read_initial_adapter_settings
from trainer.config.aliases import OTHER_TRAINERS
from trainer.config.errors import Mistake, find_nearest, to_text
from trainer.config.sections import RunConfig
from trainer.config.training_sections import ZeroSection

SETTING_BY_KEY = {key: setting for setting, keys in OTHER_TRAINERS["deepspeed"].items() for key in keys.split()}
"""Our setting to use instead of a DeepSpeed key in `zero.extra`, by key."""
KNOWN_KEYS, FIXED_KEYS, UNSUPPORTED_KEYS = (
    OTHER_TRAINERS["deepspeed_keys"][name].split() for name in ("known", "fixed", "replacing")
)


def check_extra(extra: dict[str, Any]) -> Iterator[Mistake]:
    """Yield a mistake for each key that is unknown, has its own setting, or that zerolora sets or does not support."""
    partition = extra.get("zero_optimization", {})
    if not isinstance(partition, dict):
        fix = "set the stage with zero.stage"
        yield Mistake("zero.extra.zero_optimization", to_text(partition), "must be a mapping", fix)
        return
    entries = {**extra, **{f"zero_optimization.{key}": value for key, value in partition.items()}}
    for key, value in entries.items():
        name = f"zero.extra.{key}"
        if key in SETTING_BY_KEY:
            yield Mistake(name, to_text(value), "has its own setting", f"use {SETTING_BY_KEY[key]} instead")
        if key in FIXED_KEYS:
            yield Mistake(name, to_text(value), "is set by zerolora and cannot be changed", "remove it")
        if key in UNSUPPORTED_KEYS:
            yield Mistake(name, to_text(value), "is a DeepSpeed feature that zerolora does not support", "remove it")
        elif "." not in key and key not in (*KNOWN_KEYS, *FIXED_KEYS, *SETTING_BY_KEY):
            fix = f"did you mean {close}?" if (close := find_nearest(key, KNOWN_KEYS)) else "remove it"
            yield Mistake(name, to_text(value), "unknown DeepSpeed key", fix)
    if "data_types" in extra:
        problem = "makes DeepSpeed use an optimizer that checkpoints do not support"
        fix = "remove it, or set training.precision: fp32"
        yield Mistake("zero.extra.data_types", to_text(extra["data_types"]), problem, fix)


def gathers_per_layer(config: RunConfig) -> bool:
    """Return whether zerolora shards and gathers the base model per layer, while DeepSpeed uses stage 2."""
    return config.zero.stage == 3 and config.zero.gather != "module" and describe_layer_gather_problem(config) is None


def resolve_engine_zero(config: RunConfig) -> ZeroSection:
    """Return the ZeRO settings for DeepSpeed's engine.

    Uses stage 2 if zerolora gathers the base model per layer. Runs with several adapters use stage 1 instead of
    0, because stage 1's optimizer skips the update of all adapters if one adapter's gradient is not finite.
    """
    if config.adapters and config.zero.stage == 0:
        return config.zero.model_copy(update={"stage": 1})
    if not gathers_per_layer(config):
        return config.zero
    return config.zero.model_copy(update={"stage": 2, "offload_parameters": False})


def describe_layer_gather_problem(config: RunConfig) -> str | None:
    if config.adapter == "none":
        return "per-layer gathering needs frozen weights, but all weights are trained"
    if config.lora.dora or read_initial_adapter_settings(config).get("use_dora"):
        return "DoRA needs unpartitioned weights for its initialization"
    if config.lora.adapter_path and not Path(config.lora.adapter_path).is_dir():
        return "the type of an adapter on the Hub is unknown before it is loaded"
    if "zero_optimization" in config.zero.extra:
        return "zero.extra configures DeepSpeed's own stage 3"
    return None
