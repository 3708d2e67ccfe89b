"""Select the tensors of fused experts to adapt, and the rank of their adapters.

PEFT lists these tensors in `target_parameters`. PEFT's translation of older names (peft#3711) is not used: it mistakes
gate_proj, up_proj and down_proj of dense layers and shared experts for parts of routed experts, and drops them.
"""

import re
import sys
from difflib import get_close_matches
from typing import Any

from torch import nn

from trainer.config import LoraSection, UserError
from trainer.config.types import is_pattern
from trainer.model.expert_layers import (
    TOP_K_NAMES,
    USUAL_NAMES,
    count_experts_per_token,
    find_expert_modules,
    get_expert_shape,
    get_expert_width,
    has_fused_experts,
    list_expert_tensors,
)
from trainer.model.reached_layers import probe_gradient_coverage
from trainer.parallel.engine.linear_layers import find_expert_weights
from trainer.parallel.engine.partitioned import get_full_shape

UNSUPPORTED_INITS = ("pissa", "pissa_niter_16", "olora", "loftq", "orthogonal")
ALL_LINEAR = ("all-linear",)
LOAD_BALANCING = "load_balancing_loss_func"
"""Name of the load-balancing loss function in transformers' modeling files."""


def find_expert_targets(model: nn.Module, lora: LoraSection, non_text_pattern: str | None = None) -> list[str]:
    """Return the paths of the expert tensors to adapt.

    Omits experts that receive no gradient, and tensors that match `lora.exclude_modules` or the pattern
    `non_text_pattern` (modules outside the text model). The list is empty if an adapter is loaded or `lora.experts` is
    false.
    """
    if not lora.experts or lora.adapter_path:
        return []
    excluded = "|".join(filter(None, [*map(build_subtree_pattern, lora.exclude_modules), non_text_pattern]))
    paths, layers = [], find_expert_modules(model)
    unreached = probe_gradient_coverage(model).unreached if layers else {}
    for path, module in layers.items():
        for name in list_expert_tensors(module) if path not in unreached else ():
            names = list_aliases(path, name)
            is_target = lora.target_modules == ALL_LINEAR or any(
                matches_aliases(target, names) for target in (*lora.target_modules, *lora.target_parameters)
            )
            if is_target and not (excluded and any(re.fullmatch(excluded, alias) for alias in names)):
                paths.append(f"{path}.{name}")
    return paths


def find_other_parameters(model: nn.Module, lora: LoraSection) -> list[str]:
    """Return the paths of non-expert tensors in `lora.target_parameters` and of routers in `lora.target_modules`."""
    experts = set(find_expert_modules(model))
    paths = []
    for path, parameter in model.named_parameters():
        parent, _, last = path.rpartition(".")
        if parent in experts or len(get_full_shape(parameter)) not in (2, 3):
            continue
        is_named = any(path == name or path.endswith(f".{name}") for name in lora.target_parameters)
        may_be_router = last == "weight" and any(matches_path(name, parent) for name in lora.target_modules) and experts
        if is_named or (may_be_router and is_router(model.get_submodule(parent))):
            paths.append(path)
    return paths


def is_router(module: nn.Module) -> bool:
    """Return whether a module is a router with its own weight parameter, judged by its class name."""
    return "Router" in type(module).__name__ and isinstance(getattr(module, "weight", None), nn.Parameter)


def list_aliases(path: str, name: str) -> list[str]:
    """Return all names that settings may use for an expert tensor; `*` replaces the expert's index."""
    parts = [name, *USUAL_NAMES[name]]
    return [path, *(f"{path}.{part}" for part in parts), *(f"{path}.*.{part}" for part in parts[1:] or parts)]


def list_expert_aliases(model: nn.Module) -> list[str]:
    layers = find_expert_modules(model).items()
    return [
        alias for path, module in layers for name in list_expert_tensors(module) for alias in list_aliases(path, name)
    ]


def matches_aliases(target: str, aliases: list[str]) -> bool:
    return any(matches_path(target, alias) for alias in aliases)


def check_experts(model: Any, lora: LoraSection, non_text_pattern: str | None = None) -> None:
    _check_parameters(model, lora)
    targets = find_expert_targets(model, lora, non_text_pattern)
    if not targets:
        return
    fix = "or exclude the experts with lora.experts: false"
    if lora.dora:
        raise UserError(f"lora.dora=true: not supported for experts; set lora.dora: false, {fix}")
    if lora.init in UNSUPPORTED_INITS:
        raise UserError(f"lora.init={lora.init}: not supported for experts; use default or gaussian, {fix}")
    rank = resolve_expert_rank(model, lora)
    width = min(get_expert_width(model.get_submodule(path.rpartition(".")[0])) for path in targets)
    if rank > width:
        setting = f"lora.r={lora.r}" if lora.expert_rank == "r" else f"lora.expert_rank={lora.expert_rank}"
        per_expert = max(1, lora.r // count_experts_per_token(model.config))
        raise UserError(
            f"{setting}: exceeds the width {width} of an expert, so a higher rank adds nothing; set "
            f"lora.expert_rank to {width} or less (r/top_k is {per_expert} here)"
        )


def _check_parameters(model: nn.Module, lora: LoraSection) -> None:
    experts, aliases = find_expert_modules(model), list_expert_aliases(model)
    unknown = {type(m).__name__ for m in model.modules() if find_expert_weights(m) and not has_fused_experts(m)}
    reason = f"adapters do not support the experts of {min(unknown)}" if unknown else "this model has no experts"
    matrices = [path for path, parameter in model.named_parameters() if len(get_full_shape(parameter)) in (2, 3)]
    linear = [f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    fix = "set lora.experts: true, or remove the entry"
    for name in lora.target_parameters:
        if matches_aliases(name, aliases):
            if not lora.experts:
                raise UserError(f"lora.target_parameters={name}: matches experts, but lora.experts is false; {fix}")
        elif not any(_ends_with(path, name) for path in matrices):
            if not experts and "experts" in name.split("."):
                raise UserError(f"lora.target_parameters={name}: {reason}; remove the entry")
            names = {path if path.endswith(".weight") else _last_component(path) for path in (*matrices, *aliases)}
            nearest = get_close_matches(_last_component(name), sorted(names), n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "use a name from model.named_parameters()"
            raise UserError(f"lora.target_parameters={name}: matches no parameter of this model; {hint}")
        elif "all-linear" in lora.target_modules and any(_ends_with(path, name) for path in linear):
            raise UserError(f"lora.target_parameters={name}: already adapted by all-linear; remove the entry")
    if not experts:
        if lora.expert_rank != "r":
            raise UserError(f"lora.expert_rank={lora.expert_rank}: {reason}; remove the setting")
        for name in lora.target_modules:
            if "experts" in name.split("."):
                raise UserError(f"lora.target_modules={name}: {reason}; list other layers, or use all-linear")
    for name in lora.target_modules if experts else ():
        if matches_aliases(name, aliases) and not lora.experts and "experts" in name.split("."):
            raise UserError(f"lora.target_modules={name}: matches experts, but lora.experts is false; {fix}")
        if single := re.search(r"(?:^|\.)experts\.(\d+)(?=\.|$)", name):
            pattern = name[: single.start(1)] + "*" + name[single.end(1) :]
            raise UserError(
                f"lora.target_modules={name}: matches one expert, but all experts of a layer are adapted together; use "
                f"{pattern if matches_aliases(pattern, aliases) else 'experts'}"
            )


def check_experts_per_token(base_model: str, model: Any) -> None:
    """Raise UserError if config.json routes a token to more experts than exist. The model may be on the meta device."""
    text, modules = model.config.get_text_config(), find_expert_modules(model).values()
    name = next((key for key in TOP_K_NAMES if isinstance(getattr(text, key, None), int)), None)
    experts = min((get_expert_shape(module, list_expert_tensors(module)[0])[0] for module in modules), default=0)
    if experts and name and not 1 <= getattr(text, name) <= experts:
        raise UserError(
            f"base_model={base_model}: config.json has {name}={getattr(text, name)}, but the model has {experts} "
            "experts; copy config.json from the original model"
        )


def check_router_loss(model: nn.Module, weight: float, lora: LoraSection | None) -> None:
    """Raise UserError if `training.router_aux_loss` is set without a load-balancing loss or trained router."""
    setting = f"training.router_aux_loss={weight}"
    if not weight:
        return
    if not hasattr(sys.modules[type(model).__module__], LOAD_BALANCING) or not find_expert_modules(model):
        raise UserError(f"{setting}: {type(model).__name__} computes no load-balancing loss; set the weight to 0")
    names = () if lora is None else (*lora.target_modules, *lora.modules_to_save, *lora.target_parameters)
    routers = [
        path
        for path, module in model.named_modules()
        if is_router(module) or _last_component(path) in ("gate", "router")
    ]
    if lora is not None and not any(
        _ends_with(path, name.removesuffix(".weight")) for path in routers for name in names
    ):
        name = _last_component(routers[0]) if routers else "gate"
        fix = f"add {name} to lora.modules_to_save or lora.target_modules, or set the weight to 0"
        raise UserError(f"{setting}: has no effect, because the router is not trained; {fix}")


def resolve_expert_rank(model: Any, lora: LoraSection) -> int:
    if lora.expert_rank == "r":
        return lora.r
    if lora.expert_rank == "r/top_k":
        return max(1, lora.r // count_experts_per_token(model.config))
    return int(lora.expert_rank)


def build_subtree_pattern(name: str) -> str:
    """Return a pattern that matches all paths ending in `name`, and all paths below them."""
    root = f"(?:{name})" if is_pattern(name) else rf"(?:.*\.)?{re.escape(name)}"
    return rf"{root}(?:\..*)?"


def matches_path(name: str, path: str) -> bool:
    """Return whether the path ends in `name`, or matches it as a regular expression."""
    return _ends_with(path, name) or (is_pattern(name) and re.fullmatch(name, path) is not None)


def _last_component(path: str) -> str:
    return path.rpartition(".")[2]


def _ends_with(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")
