"""Select the layers to adapt from lora.target_modules and lora.exclude_modules.

As in PEFT, a name matches every module path that ends in it, and a regular expression must match the whole path. An
excluded name also excludes everything below it (`mlp`, `vision_tower`). Layers that cannot be trained are excluded too.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product
from typing import Any

from torch import nn

from trainer.config import LoraSection, UserError
from trainer.config.adapter_settings import PROJECTORS
from trainer.config.errors import to_text
from trainer.config.types import is_pattern
from trainer.model.expert_layers import USUAL_NAMES, find_expert_modules, find_router_weights
from trainer.model.expert_targets import (
    ALL_LINEAR,
    build_subtree_pattern,
    check_experts,
    find_expert_targets,
    find_other_parameters,
    is_router,
    list_expert_aliases,
    matches_aliases,
    matches_path,
    resolve_expert_rank,
)
from trainer.model.model_kind import find_output_layer
from trainer.model.older_names import find_expert_like_names, find_rejected_names
from trainer.model.reached_layers import probe_gradient_coverage
from trainer.parallel.engine.linear_layers import get_logical_shape, is_linear, is_quantized
from trainer.parallel.engine.partitioned import get_full_shape

ROUTER_REASON = "route tokens to experts; to adapt them, name them in lora.target_modules"


@dataclass(frozen=True)
class Targets:
    """The full paths of the adapted layers and parameters, and the rank of expert adapters."""

    modules: tuple[str, ...]
    experts: tuple[str, ...]
    others: tuple[str, ...]
    expert_rank: int

    @property
    def parameters(self) -> tuple[str, ...]:
        """Paths for PEFT's `target_parameters`."""
        return (*self.experts, *self.others)


def resolve_targets(model: Any, lora: LoraSection) -> Targets | None:
    """Return all adapted paths; None if PEFT finds them itself, by name or from a loaded adapter's settings."""
    if hasattr(model, "list_default_targets"):
        return None if lora.adapter_path else Targets(tuple(find_layers_to_adapt(model, lora)), (), (), lora.r)
    by_path = any(map(is_pattern, lora.target_modules)) or lora.target_parameters or find_expert_modules(model)
    ambiguous = find_expert_like_names(model, {"gate", *(name for names in USUAL_NAMES.values() for name in names)})
    if lora.adapter_path or not (ambiguous or by_path):
        return None
    return Targets(
        tuple(find_layers_to_adapt(model, lora)),
        tuple(find_expert_targets(model, lora, _build_pattern(find_unadapted_towers(model, lora)))),
        tuple(find_other_parameters(model, lora)),
        resolve_expert_rank(model, lora),
    )


def find_layers_to_adapt(model: Any, lora: LoraSection) -> Iterator[str]:
    """Yield the paths of the layers to adapt, except experts and parameters. The model may be on the meta device."""
    from transformers.pytorch_utils import Conv1D

    excluded, head, experts = build_exclusion_pattern(model, lora), find_output_layer(model), find_expert_modules(model)
    default_targets = set(model.list_default_targets()) if hasattr(model, "list_default_targets") else None
    for path, module in model.named_modules():
        if lora.target_modules == ALL_LINEAR and default_targets is not None:
            is_target = path in default_targets
        elif lora.target_modules == ALL_LINEAR:
            is_target = isinstance(module, nn.Linear | Conv1D) and module is not head
        else:
            is_target = _has_matrix_weight(module) and _is_target(path, lora)
            is_target = is_target and path not in experts and not is_router(module)
        if is_target and not (excluded and re.fullmatch(excluded, path)):
            yield path


def check_targets(model: Any, lora: LoraSection) -> None:
    """Raise UserError with a fix if a target or exclusion in `lora` has no effect. Works on the meta device."""
    paths = {path: module for path, module in model.named_modules() if path}
    linear = {path for path, module in paths.items() if _has_matrix_weight(module)}
    towers = find_unadapted_towers(model, lora)
    outside_text = _build_pattern(towers)
    check_experts(model, lora, outside_text)
    expert_aliases, untrainable = list_expert_aliases(model), find_untrainable_layers(model)
    for name in () if lora.target_modules == ALL_LINEAR else lora.target_modules:
        if lora.experts and matches_aliases(name, expert_aliases):
            continue
        matched = {path for path in paths if matches_path(name, path)}
        reachable = {path for path in matched if not (outside_text and re.fullmatch(outside_text, path))}
        if matched and not reachable:
            fix = "set vision.train: lora" if lora.image_parts == "none" else "remove it"
            problem = "is outside the language model and receives no text"
            raise UserError(f"lora.target_modules={to_text(name)}: {problem}; {fix}")
        if not matched & linear:
            parents = tuple(f"{path}." for path in reachable)
            if inner := _summarize_names(path for path in linear if path.startswith(parents)):
                raise UserError(
                    f"lora.target_modules={to_text(name)}: is not a layer, but contains layers; use {inner}"
                )
            raise _build_unmatched_error("target_modules", name, linear, "layer")
        if reachable & linear <= set(untrainable):
            reason = untrainable[min(reachable & linear)]
            raise UserError(f"lora.target_modules={to_text(name)}: cannot be trained ({reason}); use other layers")
    # An entry may name an excluded tower, but a name that occurs only inside a tower has no effect.
    excludable = {
        path for path in paths if path in towers or not (outside_text and re.fullmatch(outside_text, path))
    } | {*expert_aliases}
    for name in lora.exclude_modules:
        if not any(re.fullmatch(build_subtree_pattern(name), path) for path in excludable):
            raise _build_unmatched_error("exclude_modules", name, excludable, "module")
    for name in lora.modules_to_save:
        if not any(path == name or path.endswith(f".{name}") for path in paths):
            raise _build_unmatched_error("modules_to_save", name, set(paths), "module")
    layers = list(find_layers_to_adapt(model, lora))
    adapted = [*layers, *find_expert_targets(model, lora, outside_text), *find_other_parameters(model, lora)]
    for path, name in product(adapted, lora.modules_to_save) if lora.target_modules != ALL_LINEAR else ():
        if f".{name}." in f".{path}.":
            problem = f"{path} is trained in full, by lora.modules_to_save={to_text(lora.modules_to_save)}"
            raise UserError(f"lora.target_modules={to_text(lora.target_modules)}: {problem}; remove it from one list")
    for setting, pattern in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        for name in pattern:
            if not any(re.match(rf"(.*\.)?({name})$", path) for path in adapted):
                raise _build_unmatched_error(setting, name, set(adapted), "adapted layer")
    if not adapted and lora.exclude_modules:
        problem = "excludes all layers; remove some entries"
        raise UserError(f"lora.exclude_modules={to_text(lora.exclude_modules)}: {problem}")
    if not adapted and lora.target_modules == ALL_LINEAR:
        reasons = "; ".join(dict.fromkeys(untrainable.values())) or "the model has no linear layer"
        raise UserError(f"lora.target_modules={ALL_LINEAR[0]}: no layer can be adapted ({reasons}); use another model")
    _check_ranks(lora, {path: paths[path] for path in layers})


def _check_ranks(lora: LoraSection, layers: dict[str, nn.Module]) -> None:
    """Raise UserError if the rank of an adapted layer is useless, or not possible with lora.init."""
    weights = [(path, weight) for path, layer in layers.items() for weight in layer.parameters(recurse=False)]
    widths = {path: min(get_full_shape(weight)) for path, weight in weights if weight.dim() == 2}
    if widths and lora.r > (widest := max(widths.values())) and not lora.adapter_path:
        raise UserError(
            f"lora.r={lora.r}: no adapted layer of this model is wider than {widest}, so a higher rank adds "
            f"nothing; use {widest} or less (8 to 64 are usual)"
        )
    for path, width in widths.items():
        ranks = (rank for name, rank in lora.rank_pattern.items() if re.match(rf"(.*\.)?({name})$", path))
        rank = next(ranks, lora.r)
        if (lora.init.startswith(("pissa", "olora")) and rank > width) or (lora.init == "orthogonal" and rank % 2):
            need = "an even rank" if lora.init == "orthogonal" else f"a rank of at most {width}"
            raise UserError(f"lora.init={lora.init}: {path} needs {need}, not {rank}; set lora.r or lora.rank_pattern")


def build_exclusion_pattern(model: nn.Module, lora: LoraSection) -> str | None:
    """Return a pattern for PEFT's `exclude_modules` that matches the paths to exclude; None if nothing is excluded."""
    patterns = [build_subtree_pattern(name) for name in lora.exclude_modules]
    if not lora.experts and any("experts" in path.split(".") for path, _ in model.named_modules()):
        patterns.append(build_subtree_pattern("experts"))  # experts that are modules
    patterns += filter(None, [_build_pattern(find_unadapted_towers(model, lora))])
    excluded = find_untrainable_layers(model)
    if lora.target_modules == ALL_LINEAR:
        excluded |= _find_excluded_by_default(model)
    others = {path for path, module in model.named_modules() if _has_matrix_weight(module)} - set(excluded)
    patterns += filter(None, [_build_pattern(list(excluded), others)])
    return "|".join(patterns) or None


def find_untrainable_layers(model: Any) -> dict[str, str]:
    if hasattr(model, "list_default_targets"):
        return {}
    outside_text, reasons = _build_pattern(find_non_text_modules(model)), dict(probe_gradient_coverage(model).unreached)
    linear = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    rejected = find_rejected_names(model, {path.rpartition(".")[2] for path in linear})
    reasons |= {path: rejected[name] for path in linear if (name := path.rpartition(".")[2]) in rejected}
    return {path: reason for path, reason in reasons.items() if not (outside_text and re.fullmatch(outside_text, path))}


def _find_excluded_by_default(model: Any) -> dict[str, str]:
    routers = {name.removesuffix(".weight") for name in find_router_weights(model)}
    linear: dict[str, Any] = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    # Subclasses that do not compute x W^T + b.
    custom = [path for path, module in linear.items() if not is_quantized(module.weight) and not is_linear(module)]
    reasons = dict.fromkeys(custom, "compute more than a matrix product, as routers do")
    return reasons | dict.fromkeys(sorted(routers & set(linear) - set(custom)), ROUTER_REASON)


def describe_unadapted_layers(model: Any, lora: LoraSection) -> list[str]:
    if lora.adapter_path:
        return []
    base, all_linear = model.get_base_model(), lora.target_modules == ALL_LINEAR
    excluded, towers = "|".join(map(build_subtree_pattern, lora.exclude_modules)), find_unadapted_towers(base, lora)
    special = (_find_excluded_by_default(base) if all_linear else {}) | find_untrainable_layers(base)
    reasons: dict[str, list[str]] = defaultdict(list)
    for path, module in _find_unadapted(base):
        if not all_linear and not (_is_target(path, lora) and path in special):
            continue
        if module is find_output_layer(base):
            reasons["the output head"].append(path)
        elif tower := next((tower for tower in towers if path.startswith(f"{tower}.")), None):
            reasons["outside the language model, receives no text"].append(tower)
        elif excluded and re.fullmatch(excluded, path):
            reasons["lora.exclude_modules"].append(path)
        elif hasattr(base, "list_default_targets"):
            reasons["outside attention and feed-forward; to adapt them, name them in lora.target_modules"].append(path)
        elif path in special:
            reasons[special[path]].append(path)
        elif not lora.experts and "experts" in path.split("."):
            reasons["lora.experts: false"].append(path)
        else:
            reasons["PEFT has no adapter for them"].append(path)
    return [f"without adapter: {_summarize_names(paths)}: {reason}" for reason, paths in reasons.items()]


def _has_matrix_weight(module: nn.Module) -> bool:
    return any(len(get_logical_shape(parameter)) > 1 for parameter in module.parameters(recurse=False))


def _find_unadapted(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper
    from transformers.pytorch_utils import Conv1D

    adapted: list[str] = []
    for path, module in base.named_modules():
        if any(path.startswith(f"{parent}.") for parent in adapted):
            continue
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            # Expert adapters wrap the experts' module, which may contain further layers.
            is_layer = isinstance(getattr(module, "base_layer", nn.Linear), nn.Linear | Conv1D | nn.Embedding)
            is_adapted = is_layer or isinstance(module, AuxiliaryTrainingWrapper)
            adapted += [path] if is_adapted else [f"{path}.lora_A", f"{path}.lora_B"]
        elif isinstance(module, nn.Linear | Conv1D):
            yield path.replace(".base_layer", ""), module


def find_unadapted_towers(model: Any, lora: LoraSection) -> list[str]:
    """Return the paths of unadapted towers and projectors (with `vision.train: lora`, only of audio modules)."""
    towers = find_non_text_modules(model)
    return [path for path in towers if "audio" in path] if lora.image_parts == "lora" else towers


def find_projectors(model: Any) -> list[str]:
    """Return the paths of modules that map image features to embeddings, with one path per ModuleList entry."""
    towers, projectors = tuple(find_non_text_modules(model)), list[str]()
    for path, module in model.named_modules():
        if f"{path}.".startswith(tuple(f"{tower}." for tower in towers)) and path.rpartition(".")[2] in PROJECTORS:
            parts = [f"{path}.{name}" for name, _ in module.named_children()]
            projectors += parts if isinstance(module, nn.ModuleList) else [path]
    return projectors


def find_non_text_modules(model: Any) -> list[str]:
    if model.config.get_text_config() is model.config:
        return []
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    text_path = next(path for path, module in model.named_modules() if module is embedding).rpartition(".")[0]
    outside: list[str] = []
    for path, module in model.named_modules():
        is_text = not path or path == text_path or path.startswith(f"{text_path}.") or text_path.startswith(f"{path}.")
        holds_head = any(module is head for module in module.modules())
        if not is_text and not holds_head and not any(path.startswith(f"{parent}.") for parent in outside):
            outside.append(path)
    return outside


def _build_pattern(paths: list[str], others: Collection[str] = ()) -> str | None:
    """Build a pattern that matches `paths` and everything below them; None if `paths` is empty.

    The pattern accepts any layer index, unless it would then match one of the paths in `others`.
    """
    kinds: dict[str, list[str]] = defaultdict(list)
    for path in map(re.escape, paths):
        kinds[re.sub(r"(?<=\\\.)\d+(?=\\\.|$)", r"\\d+", path)].append(path)
    chosen = [
        pattern
        for kind, exact in kinds.items()
        for pattern in (exact if any(re.fullmatch(kind, other) for other in others) else [kind])
    ]
    return rf"(?:{'|'.join(chosen)})(?:\..*)?" if chosen else None


def _is_target(path: str, lora: LoraSection) -> bool:
    return any(matches_path(name, path) for name in lora.target_modules)


def _build_unmatched_error(setting: str, name: str, paths: set[str], kind: str) -> UserError:
    names = {word for path in paths for word in path.split(".") if not word.isdigit()}
    last = name.rpartition(".")[2]
    suffixed = [f"{last}_proj"] if f"{last}_proj" in names else get_close_matches(last, sorted(names), n=1)
    nearest = [", ".join(name.split())] if len(name.split()) > 1 else suffixed
    hint = f"did you mean {nearest[0]}? Available" if nearest else "available"
    problem = f"matches no {kind} of this model; {hint}: {_summarize_names(paths)}"
    return UserError(f"lora.{setting}={to_text(name)}: {problem}")


def _summarize_names(paths: Any) -> str:
    """Summarize paths by last component, with counts: `k_proj (32), q_proj (32)`."""
    counts = Counter(next((part for part in path.split(".")[::-1] if not part.isdigit()), path) for path in paths)
    names = [f"{name} ({count})" for name, count in sorted(counts.items())]
    return ", ".join(names[:30]) + (", ..." if len(names) > 30 else "")
