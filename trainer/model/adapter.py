"""Add PEFT adapters to the base model, count their parameters and check their gradients."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config import LoraSection, UserError
from trainer.config.adapter_settings import SETTINGS_FILE, read_adapter_settings
from trainer.config.files import read_safetensors_header
from trainer.model.expert_targets import matches_path
from trainer.model.model_kind import has_score_head
from trainer.model.model_source import find_cached_file
from trainer.model.reached_layers import probe_gradient_coverage
from trainer.model.saved_adapter import (
    check_reloadable,
    get_last_components,
    load_adapter,
    set_saved_patterns,
    set_saved_targets,
)
from trainer.model.targets import (
    Targets,
    build_exclusion_pattern,
    find_layers_to_adapt,
    find_projectors,
    resolve_targets,
)
from trainer.parallel.engine.adapter_choice import ATTRIBUTE, DEFAULT, AdapterChoice
from trainer.parallel.engine.flat_adapter import FLAT_PREFIX, find_flat_adapter, list_trained_parameters
from trainer.parallel.engine.linear_layers import get_logical_shape
from trainer.parallel.engine.partitioned import get_full_size
from trainer.parallel.ranks.group import set_seed

EXPERT_NAME = re.compile(r"(.*\bexperts)\.\d+\.(.*)")  # groups: the path before and after the expert's index
BITS_PER_PARAMETER = 2.0
"""Capacity of a trained parameter (Allen-Zhu and Li, "Knowledge Capacity Scaling Laws", 2024)."""
BITS_PER_TOKEN = 1.0
"""Approximate information per token of text, given a pretrained model."""


@dataclass(frozen=True)
class AdaptedLayers:
    """One row of the table printed at the start: adapted layers with the same name and shape."""

    name: str
    shape: str
    count: int
    parameters: int


def build_lora_config(
    lora: LoraSection,
    *,
    excluded: str | None = None,
    targets: Targets | None = None,
    projectors: Sequence[str] = (),
    added_token_ids: dict[str, list[int]] | None = None,
    task_type: str | None = "CAUSAL_LM",
) -> Any:
    """Build the peft.LoraConfig for the section `lora`.

    `excluded` is the pattern from `targets.build_exclusion_pattern`, and is ignored if `targets` lists adapted paths.
    `projectors` lists modules trained in full. PEFT rejects dropout if a target is a parameter; in that case call
    `set_dropout`.
    """
    from peft import LoraConfig

    modules = "all-linear" if lora.target_modules == ("all-linear",) else list(lora.target_modules)
    ranks = dict(lora.rank_pattern)
    if targets is not None and targets.experts and targets.expert_rank != lora.r:
        names = sorted({get_last_components(path) for path in targets.experts})
        ranks |= dict.fromkeys(map(re.escape, names), targets.expert_rank)
    return LoraConfig(
        task_type=task_type,
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=0.0 if targets is not None and targets.parameters else lora.dropout,
        target_modules=modules if targets is None else list(targets.modules),
        target_parameters=None if targets is None else list(targets.parameters) or None,
        rank_pattern=ranks,
        alpha_pattern=dict(lora.alpha_pattern),
        exclude_modules=excluded if targets is None else None,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        init_lora_weights=True if lora.init in ("default", "loftq") else lora.init,
        modules_to_save=[*lora.modules_to_save, *projectors] or None,
        trainable_token_indices=added_token_ids,
        bias="none",
    )


def changes_base_weights(lora: LoraSection) -> bool:
    """Return whether `lora.init` subtracts the initial adapter from the base weights."""
    return lora.init.startswith(("pissa", "olora"))


def apply_adapter(
    model: Any,
    lora: LoraSection,
    dtype: torch.dtype,
    added_token_ids: list[int] | None = None,
    *,
    base_model: str = "",
    task_type: str | None = "CAUSAL_LM",
    empty: bool = False,
) -> Any:
    """Add a new adapter in `dtype`, or load the adapter at `lora.adapter_path`.

    `dtype` may be a 16-bit type, because DeepSpeed keeps fp32 master weights. LoftQ (Li et al., 2023) initializes the
    adapter from the quantization error, which requires the full-precision weights of `base_model`.
    """
    from peft import get_peft_model, replace_lora_weights_loftq

    from trainer.model.expert_adapter import set_dropout, use_expert_adapters  # imports bitsandbytes

    if task_type and has_score_head(model.config):
        task_type = "SEQ_CLS"  # PEFT then trains and saves the score head
    if lora.adapter_path:
        adapted = load_initial_adapter(model, lora, empty=empty)
    else:
        token_ids = {path: added_token_ids for path in find_token_layers(model, lora)} if added_token_ids else None
        targets, excluded = resolve_targets(model, lora), build_exclusion_pattern(model, lora)
        peft_config = build_lora_config(
            lora, excluded=excluded, targets=targets, added_token_ids=token_ids, task_type=task_type,
            projectors=find_projectors(model) if lora.image_parts == "projector" else (),
        )  # fmt: skip
        try:
            with use_expert_adapters(model, peft_config):
                adapted = get_peft_model(model, peft_config, autocast_adapter_dtype=False)
        except ValueError as error:
            raise UserError(f"lora: PEFT rejected the adapter ({error}); change these settings") from None
        if targets is not None:
            set_dropout(adapted, lora.dropout)
            set_saved_targets(adapted, targets, excluded)
        if lora.init == "loftq":
            file = Path(base_model) / "model.safetensors"
            if not file.exists():
                problem = f"needs the weights in a single file, but {file} is missing"
                raise UserError(f"lora.init=loftq: {problem}; use a local single-file model")
            replace_lora_weights_loftq(adapted, model_path=str(file))
    set_saved_patterns(adapted)
    check_reloadable(adapted)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return adapted


def apply_empty_adapter(
    model: Any, lora: LoraSection, dtype: torch.dtype, *, task_type: str | None = "CAUSAL_LM"
) -> Any:
    """Add the adapter to a model without weights, with the shapes of an initial adapter on this machine."""
    plain = lora.model_copy(update={"init": "default", "adapter_path": find_initial_adapter(lora)})
    return apply_adapter(model, plain, dtype, task_type=task_type, empty=True)


def find_initial_adapter(lora: LoraSection) -> Path | None:
    """Return the folder of the adapter at `lora.adapter_path`, which may be in the Hub's cache, or None."""
    if not lora.adapter_path or Path(lora.adapter_path).is_dir():
        return Path(lora.adapter_path) if lora.adapter_path else None
    cached = find_cached_file(lora.adapter_path, SETTINGS_FILE, None)
    return None if cached is None else cached.parent


def load_initial_adapter(model: Any, lora: LoraSection, *, empty: bool = False) -> Any:
    """Load the adapter at `lora.adapter_path`, also on the meta device. Raises UserError on a mismatch."""
    error_prefix = f"lora.adapter_path={lora.adapter_path}: does not match this model"
    options: dict[str, Any] = {"error_prefix": error_prefix, "trainable": True, "dropout": lora.dropout, "empty": empty}
    return load_adapter(model, str(lora.adapter_path), **options)


def apply_adapters(
    model: Any, adapters: Sequence[tuple[LoraSection, int]], dtype: torch.dtype, *, task_type: str | None
) -> Any:
    """Add several new adapters, given as (section, seed), and initialize each as if it were the only one."""
    # Resolve paths before any layer is wrapped.
    targets = [Targets(tuple(find_layers_to_adapt(model, lora)), (), (), lora.r) for lora, _ in adapters]
    excluded = [build_exclusion_pattern(model, lora) for lora, _ in adapters]
    (first, seed), *others = adapters
    set_seed(seed)
    adapted = apply_adapter(model, first, dtype, task_type=task_type)
    names = [DEFAULT]
    for number, (lora, seed) in enumerate(others, start=1):
        names.append(f"adapter_{number}")
        set_seed(seed)
        config = build_lora_config(lora, targets=targets[number], task_type=task_type)
        adapted.add_adapter(names[-1], config, autocast_adapter_dtype=False)
        set_saved_targets(adapted, targets[number], excluded[number], names[-1])
        set_saved_patterns(adapted, names[-1])
        check_reloadable(adapted, names[-1])
    adapted.base_model.set_adapter(names)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    setattr(adapted, ATTRIBUTE, AdapterChoice(names, selected=DEFAULT))
    return adapted


def find_token_layers(model: Any, lora: LoraSection) -> list[str]:
    """Return the paths of the layers that need trainable rows for new tokens: the embedding and the untied head.

    Omits layers that are adapted or trained in full. Raises UserError if PEFT cannot train the rows.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    paths = {path: layer for path, layer in model.named_modules() if layer is embedding or layer is head}
    in_full = {path for path in paths if path.endswith(lora.modules_to_save)}  # as PEFT matches them
    trained = in_full | {path for path in paths if any(matches_path(name, path) for name in lora.target_modules)}
    remaining = [path for path in paths if path not in trained]
    names, model_name = ", ".join(path.rpartition(".")[2] for path in paths), type(model).__name__
    if tied and in_full and any(paths[path] is embedding for path in remaining):
        raise UserError(f"model.added_tokens: {model_name} ties its output head to its embedding; name both in "
                        f"lora.modules_to_save: [{names}], or neither")  # fmt: skip
    if getattr(head, "bias", None) is not None and (tied or any(paths[path] is head for path in remaining)):
        raise UserError(
            f"model.added_tokens: the output head of {model_name} has a bias, which PEFT drops when it trains rows; "
            f"train it in full with lora.modules_to_save: [{names}]"
        )
    return [path for path in remaining if paths[path] is embedding or not tied or len(remaining) == 1]


def check_added_tokens(model: Any, lora: LoraSection, tokens: Collection[int]) -> None:
    """Raise UserError if the embedding rows of new tokens cannot be trained. The model may be on the meta device."""
    layers = find_token_layers(model, lora) if tokens else []
    if not (layers and lora.adapter_path and Path(lora.adapter_path).is_dir()):
        return
    rows_by_layer = read_adapter_settings(Path(lora.adapter_path)).get("trainable_token_indices") or {}
    rows_by_layer = rows_by_layer if isinstance(rows_by_layer, dict) else {layers[0]: rows_by_layer}
    for layer in layers:
        if not any(layer.endswith(name) and set(tokens) <= set(rows) for name, rows in rows_by_layer.items()):
            raise UserError(
                f"model.added_tokens: the adapter at lora.adapter_path={lora.adapter_path} has no {layer} rows "
                "for these tokens; add them in the run that creates the adapter"
            )


def list_bias_warnings(model: nn.Module, adapter_path: str | None) -> list[str]:
    """Return a warning if the adapter has a bias for a layer without one, which prevents merging and export."""
    file = Path(adapter_path or "") / "adapter_model.safetensors"
    if not adapter_path or not file.is_file():
        return []
    modules, suffix = dict(model.named_modules()), ".lora_B.bias"
    names = [name for name in read_safetensors_header(file)[0] if name.endswith(suffix)]
    layers = [name.removeprefix("base_model.model.").removesuffix(suffix) for name in names]
    without = sorted({path.rpartition(".")[2] for path in layers if getattr(modules.get(path), "bias", None) is None})
    if not without:
        return []
    return [
        f"lora.adapter_path={adapter_path}: has lora_bias on layers without a bias ({', '.join(without)}); PEFT can "
        "load the result, but it cannot be merged or exported"
    ]


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of trainable and total parameters, counting packed weights at their unpacked size."""
    trainable = total = 0
    trained = {id(parameter) for _, parameter in list_trained_parameters(model)}
    for name, parameter in model.named_parameters():
        if name.startswith(FLAT_PREFIX):
            continue  # PEFT's parameters, which are views of this buffer, are counted instead
        size = get_logical_shape(parameter).numel()
        total += size
        trainable += size if id(parameter) in trained else 0
    return trainable, total


def summarize_adapted_layers(model: nn.Module) -> list[AdaptedLayers]:
    from peft.tuners.lora import LoraLayer

    groups: dict[tuple[str, str], list[int]] = {}
    for path, module in model.named_modules():
        if isinstance(module, LoraLayer):
            shape = f"{module.in_features} -> {module.out_features}"
            size = sum(get_full_size(parameter) for parameter in module.parameters() if parameter.requires_grad)
            # PEFT nests the adapters if a module has several adapted parameters (fused experts).
            *_, name = (part for part in path.split(".") if part != "base_layer")
            parameter = getattr(module, "parameter_name", "weight")
            name += f".{parameter}" if parameter != "weight" else ""
            groups.setdefault((name, shape), []).append(size)
    layers = [AdaptedLayers(name, shape, len(sizes), sum(sizes)) for (name, shape), sizes in groups.items()]
    return sorted(layers, key=lambda layer: -layer.parameters)


def list_rank_warnings(lora: LoraSection) -> list[str]:
    path = find_initial_adapter(lora)
    if path is None or (rank := int(read_adapter_settings(path)["r"])) == lora.r:
        return []
    return [f"lora.r={lora.r}: ignored, because the adapter at {lora.adapter_path} has r={rank}"]


class GradientCheck:
    """Checks in the first backward pass that every trainable parameter receives a finite gradient.

    Gradient checkpointing and partitioning can break LoRA silently: no error, only missing gradients.
    """

    def __init__(self, model: nn.Module, *, finite: bool = True) -> None:
        """Register the gradient hooks. Set `finite=False` for fp16, where the first loss scales may overflow."""
        self._check_finite = finite
        self._finite: dict[str, torch.Tensor] = {}
        trained = list_trained_parameters(model)
        self._names = [name for name, _ in trained]
        self._flat = find_flat_adapter(model)
        self._base = getattr(model, "get_base_model", lambda: model)()
        # Factors in a flat buffer are not leaves; the views created in each forward pass receive the gradients.
        self._handles = [p.register_hook(self._build_hook(name)) for name, p in trained if p.requires_grad]
        if self._flat is not None:
            self._flat.view_hook = lambda name, v: self._handles.append(v.register_hook(self._build_hook(name)))

    def _build_hook(self, name: str) -> Any:
        def hook(grad: torch.Tensor | None) -> None:
            if grad is None:  # only other views of the flat buffer received a gradient
                return
            finite = torch.isfinite(grad).all()
            self._finite[name] = self._finite[name] & finite if name in self._finite else finite

        return hook

    def _may_lack_gradient(self, name: str) -> bool:
        """Return whether a trained tensor may receive no gradient in the first step.

        This is the case for an expert without tokens if another expert of the layer received some, and for layers
        that only long sequences reach.
        """
        expert = EXPERT_NAME.match(name)
        others = filter(None, map(EXPERT_NAME.match, self._finite))
        if expert and any(other.group(1, 2) == expert.group(1, 2) for other in others):
            return True
        path = name.removeprefix("base_model.model.").partition(".lora_")[0]
        return hasattr(self._base, "config") and path in probe_gradient_coverage(self._base).only_in_long_sequences

    def finish(self) -> None:
        """Remove the hooks and check the gradients they recorded.

        Raises:
            RuntimeError: if a parameter received no gradient, unless it may lack one (`_may_lack_gradient`).
            FloatingPointError: if a gradient is not finite.
        """
        if self._flat is not None:
            self._flat.view_hook = None
        for handle in self._handles:
            handle.remove()
        missing = [name for name in self._names if name not in self._finite and not self._may_lack_gradient(name)]
        if missing:
            raise RuntimeError(
                f"{len(missing)} of {len(self._names)} trained tensors got no gradient (first: {missing[0]}); "
                "add the unused layers to lora.exclude_modules"
            )
        broken = [name for name, finite in self._finite.items() if not bool(finite)]
        if broken and self._check_finite:
            raise FloatingPointError(
                f"{len(broken)} of {len(self._names)} trained tensors got a non-finite gradient (first: "
                f"{broken[0]}); lower training.learning_rate, use training.precision: bf16, or check the data"
            )


def build_capacity_warning(parameters: float, trained_tokens: float, rank: int) -> str | None:
    """Return a warning if the data contains more information than the adapter can store.

    In that case LoRA falls behind full fine-tuning (Schulman et al., "LoRA Without Regret", 2025).
    """
    capacity, information = BITS_PER_PARAMETER * parameters, BITS_PER_TOKEN * trained_tokens
    if capacity >= information:
        return None
    return (
        f"the data has about {information / 1e6:,.1f} Mbit of information, but an adapter with r={rank} stores about "
        f"{capacity / 1e6:,.1f}; use a higher lora.r, or adapter: none"
    )
