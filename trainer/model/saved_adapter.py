"""Adapters as files: settings by which PEFT alone finds the same layers, and how those of others are read."""

import re
from typing import Any

from torch import nn

from trainer.model.older_names import taken_for_experts
from trainer.model.targets import Targets


def load_adapter(
    model: Any, folder: str, *, trainable: bool = False, dropout: float = 0.0, in_32_bits: bool = False
) -> Any:
    """The model with the adapter of a folder, or of the hub, on it; experts and what they share names with as ours.

    Where experts are adapted PEFT's settings cannot say a dropout, and `dropout` is that of the coming training. With
    `in_32_bits` a 16-bit adapter is widened. Raises what PEFT raises where it does not fit.
    """
    from peft import PeftConfig, PeftModel

    from trainer.model.expert_adapter import ParamWrapper, own_experts, set_dropout  # brings bitsandbytes

    config: Any = PeftConfig.from_pretrained(folder)
    widen = {"autocast_adapter_dtype": in_32_bits}
    if not getattr(config, "target_parameters", None):
        return PeftModel.from_pretrained(model, folder, is_trainable=trainable, **widen)
    excluded = config.exclude_modules
    parameters = set(config.target_parameters)
    by_weight = {name for name in parameters if name.endswith(".weight") and _is_linear(model, name)}
    config.target_parameters = sorted(parameters - by_weight) or None
    config.target_modules = {*(config.target_modules or ()), *(name.removesuffix(".weight") for name in by_weight)}
    with own_experts(model, config):
        adapted = PeftModel.from_pretrained(model, folder, is_trainable=trainable, config=config, **widen)
    config.target_modules -= {name.removesuffix(".weight") for name in by_weight}
    config.target_parameters, config.exclude_modules, config._custom_modules = sorted(parameters), excluded, None
    if dropout and any(isinstance(module, ParamWrapper) for module in adapted.modules()):
        set_dropout(adapted, dropout)
    return adapted


def _is_linear(model: nn.Module, parameter: str) -> bool:
    """Whether what a name means is the weight of linear layers."""
    layer = parameter.removesuffix(".weight")
    found = [module for path, module in model.named_modules() if path == layer or path.endswith(f".{layer}")]
    return bool(found) and all(isinstance(module, nn.Linear) for module in found)


def write_for_peft(adapted: Any, targets: Targets, excluded: str | None) -> None:
    """Put into the saved settings of the adapter what lets PEFT alone find the same layers and parameters.

    Layers whose names PEFT keeps for experts (peft#3711) are named by their weight, which it takes to be the same.
    """
    config, base = adapted.peft_config["default"], adapted.get_base_model()
    paths = [path.replace(".base_layer", "") for path, _ in base.named_modules() if ".lora_" not in path]
    weights = [path.replace(".base_layer", "") for path, _ in base.named_parameters()]
    taken = taken_for_experts(base, {path.rpartition(".")[2] for path in targets.modules})
    by_weight = [f"{path}.weight" for path in targets.modules if path.rpartition(".")[2] in taken]
    by_name = [path for path in targets.modules if path.rpartition(".")[2] not in taken]
    not_excluded = [path for path in paths if not (excluded and re.fullmatch(excluded, path))]
    config.target_modules = set(_shortest(by_name, not_excluded, parts=1))
    config.target_parameters = sorted(_shortest([*targets.parameters, *by_weight], weights, parts=2)) or None
    config.exclude_modules = excluded
    config._custom_modules = None


def _shortest(paths: list[str], among: list[str], *, parts: int) -> list[str]:
    """Names of that many parts instead of whole paths, where they mean no other path."""
    wanted = set(paths)
    others = {tail(path, parts) for path in among if path not in wanted}
    return list(dict.fromkeys(path if tail(path, parts) in others else tail(path, parts) for path in paths))


def tail(path: str, parts: int = 2) -> str:
    return ".".join(path.split(".")[-parts:])
