"""Save adapters so that plain PEFT adapts the same layers, and load any PEFT adapter."""

import argparse
import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import UserError
from trainer.config.adapter_settings import SETTINGS_FILE, read_adapter_settings
from trainer.contract.known_versions import require
from trainer.model.older_names import find_expert_like_names, map_saved_names
from trainer.model.targets import Targets


def check_separate_weights(adapted: Any, prefix: str) -> None:
    """Raise UserError if two adapted layers share a weight (as in Zamba), since merging cannot keep both updates."""
    from peft.tuners.lora import LoraLayer

    base, paths_by_weight = adapted.get_base_model(), dict[int, str]()
    for path, layer in base.named_modules(remove_duplicate=False):
        if isinstance(layer, LoraLayer) and (weight := getattr(layer.get_base_layer(), "weight", None)) is not None:
            other = paths_by_weight.setdefault(id(weight), path)
            if base.get_submodule(other) is not layer:
                raise UserError(
                    f"{prefix}: {other} and {path} share a weight, which cannot hold the updates of both adapters; "
                    "load the adapter with PEFT instead of merging it"
                )


def load_adapter(
    model: Any,
    folder: str,
    *,
    error_prefix: str | None = None,
    trainable: bool = False,
    dropout: float = 0.0,
    in_fp32: bool = False,
    empty: bool = False,
) -> Any:
    """Load an adapter from a folder or the Hub into the model, with our forward pass for adapted experts.

    `dropout` is the dropout in training; PEFT's config cannot store it together with `target_parameters`. `in_fp32`
    converts a 16-bit adapter to fp32. `empty` adds the adapter without its tensors and without rows of new tokens.

    Raises:
        UserError: prefixed with `error_prefix`, if the file's tensors are not exactly those of the adapted model.
    """
    from peft import LoraConfig, PeftConfig, get_peft_model

    from trainer.model.expert_adapter import set_dropout, use_expert_adapters  # imports bitsandbytes

    if Path(folder).is_dir():
        read_adapter_settings(Path(folder))
    try:
        config: Any = PeftConfig.from_pretrained(folder)
        if not isinstance(config, LoraConfig):
            raise ValueError(f"peft_type is {config.peft_type}, not LORA")
        config.inference_mode, config.base_model_name_or_path = not trainable, None
        if empty:  # other initial values need the weights
            config.init_lora_weights, config.trainable_token_indices = True, None
        parameters, excluded = set(config.target_parameters or ()), config.exclude_modules
        if not parameters:
            adapted = get_peft_model(model, config, autocast_adapter_dtype=in_fp32)
        else:
            by_weight = {name for name in parameters if name.endswith(".weight") and _is_linear(model, name)}
            modules = {name.removesuffix(".weight") for name in by_weight}
            config.target_parameters = sorted(parameters - by_weight) or None
            config.target_modules = {*(config.target_modules or ()), *modules}
            with use_expert_adapters(model, config):
                adapted = get_peft_model(model, config, autocast_adapter_dtype=in_fp32)
            config.target_modules -= modules
            config.target_parameters, config.exclude_modules = sorted(parameters), excluded
            config._custom_modules = None
            set_dropout(adapted, dropout)
        if not empty:
            _load_tensors(adapted, folder, in_training=trainable)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # PEFT and torch raise many kinds of errors for adapters that do not match a model
        prefix = error_prefix or f"{folder}: does not match this base model"
        fix = f"use the base model and the {SETTINGS_FILE} that it was trained with, or train a new adapter"
        raise UserError(f"{prefix}: {_describe_mismatch(error)}; {fix}") from error
    return adapted if trainable else adapted.eval()


def _load_tensors(adapted: Any, folder: str, *, in_training: bool) -> None:
    """Load the adapter's file. Raises ValueError if its tensors are not exactly those of the adapted model."""
    from peft.utils.save_and_load import load_peft_weights

    weights: dict[str, Tensor] = load_peft_weights(folder, device="cpu")
    layers = {path for path, _ in adapted.named_modules()}
    lora_names = [name for name in weights if name.partition(".lora_")[0] in layers]
    chosen = adapted.peft_config["default"].layers_to_transform
    numbers = {int(match[1]) for name in lora_names if (match := re.search(r"\.(\d+)\.", name))}
    if chosen not in (None, []) and not numbers <= {*(chosen if isinstance(chosen, list) else [chosen])}:
        raise ValueError(f"layers_to_transform={chosen}, but it has tensors of the layers {sorted(numbers)}")
    stored_names, device = map_saved_names(adapted, lora_names), next(adapted.parameters()).device
    state = {stored_names.get(name, name): value.to(device) for name, value in weights.items()}
    base_names = {name for name, value in adapted.named_parameters(remove_duplicate=False) if not value.requires_grad}
    if in_training and (replaced := sorted(base_names & weights.keys())):  # PEFT would set it, and not save it again
        raise ValueError(f"it also has {replaced[0]}, a weight of the base model that is not in modules_to_save")
    _set_tensors(adapted, state)


def _describe_mismatch(error: Exception) -> str:
    if match := re.search(r"size mismatch for (\S+): .*?Size\((.*?)\).*?Size\((.*?)\)", str(error)):
        return f"{match[1]} has shape {match[2]} in the adapter, but {match[3]} in the model"
    return f"{error} is missing" if isinstance(error, KeyError) else str(error).partition("\n")[0].rstrip(".")


def build_empty_base(base: Any) -> Any:
    """Build the original base model on the meta device; `base` may be patched, partitioned or quantized.

    Call this in the main thread, because libraries replace torch's functions for all threads while it runs.
    """
    from transformers.initialization import no_init_weights

    if hasattr(base, "build_without_adapter"):
        return base.build_without_adapter()
    config = copy.deepcopy(base.config)
    config._attn_implementation = "eager"  # only the patched model supports our attention
    with no_init_weights(), torch.device("meta"):
        empty = type(base)(config)
        empty.tie_weights()
    return empty


def load_on_empty_base(empty: Any, settings: dict[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """Load an adapter with plain PEFT into a copy of the base model on the meta device.

    Only settings, names and shapes are needed, no tensor values. Raises ValueError if PEFT does not load every tensor.
    """
    from peft import LoraConfig, get_peft_model

    config: Any = LoraConfig.from_peft_type(**settings | {"init_lora_weights": False})
    with torch.device("meta"):
        plain = get_peft_model(copy.deepcopy(empty), config)
        state = {name: torch.empty(shape) for name, shape in shapes.items()}
    try:
        _set_tensors(plain, state)
    except (KeyError, RuntimeError) as error:  # missing rows of new tokens; a tensor with another shape
        raise ValueError(_describe_mismatch(error)) from error


def _set_tensors(adapted: Any, state: dict[str, Tensor]) -> None:
    from peft import set_peft_model_state_dict

    result = set_peft_model_state_dict(adapted, state)
    parameters = dict(adapted.named_parameters(remove_duplicate=False))
    # The file contains the parameters of tied layers only once.
    loaded = {id(parameter) for name, parameter in parameters.items() if name not in set(result.missing_keys)}
    missing = [
        name
        for name in result.missing_keys
        if re.search(r"\.default(\.|$)", name) and id(parameters.get(name)) not in loaded
    ]
    for names, problem in (
        (result.unexpected_keys, f"of the {len(state)} tensors of the adapter match no layer"),
        (missing, "tensors of the adapted model are not in the file"),
    ):
        if names:
            raise ValueError(f"{len(names)} {problem} (first: {names[0]})")


def _is_linear(model: nn.Module, parameter: str) -> bool:
    layer = parameter.removesuffix(".weight")
    modules = [module for path, module in model.named_modules() if path == layer or path.endswith(f".{layer}")]
    return bool(modules) and all(isinstance(module, nn.Linear) for module in modules)


def set_saved_targets(adapted: Any, targets: Targets, excluded: str | None, adapter: str = "default") -> None:
    """Set the adapter's saved settings so that plain PEFT finds the same layers and parameters.

    Layers whose names PEFT mistakes for experts (peft#3711) are listed by weight in `target_parameters`, which is
    equivalent. Raises UserError for DoRA on such layers.
    """
    config, base = adapted.peft_config[adapter], adapted.get_base_model()
    paths = [path.replace(".base_layer", "") for path, _ in base.named_modules() if ".lora_" not in path]
    weights = [path.replace(".base_layer", "") for path, _ in base.named_parameters()]
    reserved = find_expert_like_names(base, {path.rpartition(".")[2] for path in targets.modules})
    by_weight = [f"{path}.weight" for path in targets.modules if path.rpartition(".")[2] in reserved]
    by_name = [path for path in targets.modules if path.rpartition(".")[2] not in reserved]
    not_excluded = [path for path in paths if not (excluded and re.fullmatch(excluded, path))]
    config.target_modules = set(_shorten_paths(by_name, not_excluded, parts=1))
    config.target_parameters = sorted(_shorten_paths([*targets.parameters, *by_weight], weights, parts=2)) or None
    config.exclude_modules = excluded
    config._custom_modules = None
    if by_weight:
        if config.use_dora:
            problem = f"PEFT loads {by_weight[0]} as a parameter, and does not support DoRA for parameters"
            raise UserError(f"lora.dora=true: {problem}; set lora.dora: false, or exclude it with lora.exclude_modules")
        config.lora_dropout = 0.0  # PEFT refuses dropout if a target is a parameter


def set_saved_patterns(adapted: Any, adapter: str = "default") -> None:
    """Replace `rank_pattern` and `alpha_pattern` with full layer names if PEFT would misread them.

    PEFT uses the first pattern that matches, but sorts the patterns when it saves them. A layer that is listed
    by weight in `target_parameters` needs a pattern that matches its name with `.weight`.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import get_pattern_key

    config, saved_names = adapted.peft_config[adapter], {}
    by_weight = tuple(f".{name}" for name in config.target_parameters or ())
    for path, module in adapted.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            layer, parameter = path.replace(".base_layer", ""), getattr(module, "parameter_name", None)
            name = f"{layer}.{parameter}" if parameter else layer
            saved_names[name] = f"{name}.weight" if f".{name}.weight".endswith(by_weight) else name
    for setting in ("rank_pattern", "alpha_pattern"):
        patterns = getattr(config, setting)
        values = {name: patterns.get(get_pattern_key(patterns, name)) for name in saved_names}
        read = {name: patterns.get(get_pattern_key(sorted(patterns), saved)) for name, saved in saved_names.items()}
        if read != values:
            # `load_adapter` adapts layers that are listed by weight as modules.
            ends = {name: r"(\.weight)?" if saved != name else "" for name, saved in saved_names.items()}
            in_full = {re.escape(name) + ends[name]: value for name, value in values.items() if value is not None}
            setattr(config, setting, in_full)


def check_reloadable(adapted: Any, adapter: str = "default") -> None:
    """Raise UserError if plain PEFT could not load every tensor of this adapter from its saved files.

    The saved settings must match the adapted layers exactly, and PEFT must find each tensor by its saved name. This is
    checked with PEFT's own matching, without a second model.
    """
    import peft.utils.transformers_weight_conversion as conversion
    from peft import get_peft_model_state_dict
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import check_target_module_exists

    config, base = copy.deepcopy(adapted.peft_config[adapter]), adapted.get_base_model()
    if hasattr(base.config, "model_type"):
        require(conversion, "convert_peft_config_for_transformers", "peft")(config, base, None)
    suffixes = tuple(f".{name}" for name in config.target_parameters or ())
    layers, matched = set(), set()
    for path, module in base.named_modules():
        plain = path.replace(".base_layer", "")
        if isinstance(module, LoraLayer) and (adapter in module.lora_A or adapter in module.lora_embedding_A):
            layers.add(f"{plain}.{getattr(module, 'parameter_name', 'weight')}")
        if ".lora_" not in path:
            parameters = [f"{plain}.{name}" for name, _ in module.named_parameters(recurse=False)]
            matched |= {name for name in parameters if f".{name}".endswith(suffixes)}
            if plain and check_target_module_exists(config, plain):
                matched.add(f"{plain}.weight")
    if matched != layers:
        raise UserError(
            f"lora.target_modules: PEFT would match other layers when it loads the adapter "
            f"(first difference: {min(matched ^ layers)}); exclude them with lora.exclude_modules"
        )
    map_saved_names(adapted, get_peft_model_state_dict(adapted, adapter_name=adapter, save_embedding_layers=False))


def _shorten_paths(paths: list[str], candidates: list[str], *, parts: int) -> list[str]:
    """Shorten paths to their last `parts` components, unless these also match a candidate outside `paths`."""
    ends = {path: get_last_components(path, parts) for path in paths}
    others = {get_last_components(path, parts) for path in candidates if path not in ends}
    return list(dict.fromkeys(path if end in others else end for path, end in ends.items()))


def get_last_components(path: str, parts: int = 2) -> str:
    return ".".join(path.split(".")[-parts:])


@contextmanager
def scale_adapter_temporarily(model: Any, factor: float) -> Iterator[None]:
    original = [(scaling, dict(scaling)) for scaling in _list_scalings(model)]
    scale_adapter(model, factor)
    try:
        yield
    finally:
        for scaling, values in original:
            scaling.update(values)


def scale_adapter(model: Any, factor: float) -> None:
    for scaling in _list_scalings(model):
        for name in scaling:
            scaling[name] *= factor


def _list_scalings(model: Any) -> list[dict[str, float]]:
    from peft.tuners.lora import LoraLayer

    return [module.scaling for module in model.modules() if isinstance(module, LoraLayer)]


def parse_scale(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value <= 10.0:
        raise argparse.ArgumentTypeError(f"{text}: must be a number above 0 and at most 10, such as 0.5")
    return value
