"""Compute layers with several adapters: one frozen matmul for all rows, and each adapter for its own rows.

`fused_lora` computes the frozen matmul, with zero factors that need no gradient, so quantization, partitioning and
recomputation work as in a single-adapter run.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

import ops
from ops.groups import find_groups
from ops.many_adapters import Bundle, add_adapters, begin_frozen_matmuls
from trainer.config import UserError
from trainer.contract.known_versions import replaces
from trainer.model.expert_adapter import ParamWrapper
from trainer.parallel.engine.adapter_choice import AdapterChoice
from trainer.parallel.engine.layer_gather.shards import get_layer_shards
from trainer.patches.fused_lora import (
    MANY_TOKENS,
    FusedGroup,
    FusedLayer,
    FusionReport,
    check_operators,
    compute_group,
    describe_fusion_problem,
)
from trainer.patches.replace import replace

ZERO_FACTOR_RANK = 8
"""Rank of the zero factors: the smallest rank that the kernels support."""
SingleGroups = dict[str, tuple[FusedGroup, list[int]]]  # adapter -> its layers, and their indices


@replaces("the forward of PEFT's LoRA layers, with several adapters")
def fuse_adapters(
    model: nn.Module,
    choice: AdapterChoice,
    backend: Literal["auto", "cuda", "reference"],
    *,
    forward: Callable[[], object],
    separate: bool,
    tokens: int,
) -> FusionReport:
    """Replace the forward of every adapted layer; see `fuse_layers`. Raises UserError for unsupported layers."""
    chosen = ops.load_backend(backend)
    layers = _find_members(model, choice)
    kinds = [_build_key(name, layers.values()) for name in choice.names]
    choice.layouts = {name: kinds.index(kind) for name, kind in zip(choice.names, kinds, strict=True)}
    report = FusionReport(len(layers), f"{chosen.name}, {len(choice.names)} adapters: {chosen.reason}")
    if separate:
        report.groups = [(path,) for path in layers]
    else:
        for paths in find_groups({path: layer.module for path, layer in layers.items()}, forward):
            members = [layers[path].any_member for path in paths]
            together = len({(member.kind[:-1], member.unit) for member in members}) == 1
            report.groups += [paths] if together else [(path,) for path in paths]
    groups: list[FusedGroup] = []
    for paths in report.groups:
        groups += _install([layers[path] for path in paths], choice)
    check_operators(groups, get_layer_shards(model), test_many_tokens=chosen.name == "cuda" and tokens >= MANY_TOKENS)
    return report


@dataclass
class _Layer:
    path: str
    module: Any
    members: dict[str, FusedLayer]

    @property
    def any_member(self) -> FusedLayer:
        return next(iter(self.members.values()))


def _find_members(model: nn.Module, choice: AdapterChoice) -> dict[str, _Layer]:
    from peft.tuners.lora import LoraLayer

    layers: dict[str, _Layer] = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        if isinstance(layer, ParamWrapper):
            raise UserError(f"adapters: {path} is an expert, which supports only one adapter; set lora.experts: false")
        module: Any = layer
        members: dict[str, FusedLayer] = {}
        active = module._active_adapter
        for name in choice.names:
            if name not in module.lora_A:
                continue
            module._active_adapter = [name]
            if reason := describe_fusion_problem(module):
                raise UserError(f"adapters: {path}: {reason}; exclude it with lora.exclude_modules")
            members[name] = FusedLayer(module, active)
        module._active_adapter = active
        layers[path] = _Layer(path, module, members)
    return layers


def _build_key(name: str, layers: Iterable[_Layer]) -> Hashable:
    """Return the grouping key of an adapter: adapters with equal keys are computed together.

    An adapter with dropout gets a unique key, because it needs its own mask.
    """
    members = [(layer.path, layer.members[name]) for layer in layers if name in layer.members]
    if any(member.has_dropout for _, member in members):
        return name
    return tuple((path, len(member.down), member.layer.scaling[name]) for path, member in members)


def _install(layers: Sequence[_Layer], choice: AdapterChoice) -> list[FusedGroup]:
    common = _CommonGroup(layers, choice)
    single: SingleGroups = {}
    for name in choice.names:
        indices = [index for index, layer in enumerate(layers) if name in layer.members]
        if indices:
            single[name] = FusedGroup([layers[index].members[name] for index in indices]), indices
    for index, layer in enumerate(layers):
        replace(layer.module, "forward", _build_forward(index, layer, choice, common, single))
    return [group for group, _ in single.values()]


def _build_forward(
    index: int, layer: _Layer, choice: AdapterChoice, common: "_CommonGroup", single: SingleGroups
) -> Callable[..., Tensor]:
    module, peft_forward = layer.module, layer.module.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if module._disable_adapters:
            return peft_forward(x, *args, **kwargs)
        name = choice.selected
        if name is not None and name not in layer.members:
            return module.base_layer(x, *args, **kwargs)
        if args or kwargs or not layer.any_member.applies_to(x):
            raise RuntimeError(f"several adapters: unsupported input {x.dtype} {tuple(x.shape)} {[*args, *kwargs]}")
        if name is None:
            return common.compute_output(index, x)
        group, indices = single[name]
        return group.compute_output(indices.index(index), x)

    return forward


class _CommonGroup(FusedGroup):
    """Computes layers that share an input, in passes over rows of several adapters."""

    def __init__(self, layers: Sequence[_Layer], choice: AdapterChoice) -> None:
        super().__init__([layer.any_member for layer in layers])
        self._layers, self._choice = list(layers), choice
        self._mask: dict[str, int] = {}
        """Index of this group's dropout mask within a pass, by adapter."""
        for name in choice.names:
            if any(name in layer.members and layer.members[name].has_dropout for layer in layers):
                self._mask[name] = choice.dropout_counts.get(name, 0)
                choice.dropout_counts[name] = self._mask[name] + 1

    def compute(self, members: Sequence[FusedLayer], x: Tensor) -> list[Tensor]:
        layers = [self._layers[self.members.index(member)] for member in members]
        zeros = [_build_zero_factors(member) for member in members]
        x_frozen, pending = begin_frozen_matmuls(x)
        frozen = compute_group(members, x_frozen, ([down for down, _ in zeros], [up for _, up in zeros]))
        bundles: list[Bundle] = []
        factors: tuple[list[Tensor], list[Tensor]] = [], []
        start = 0
        for (name, *others), tokens in self._choice.row_groups:
            count = 1 + len(others)
            end = start + count * tokens
            indices = tuple(index for index, layer in enumerate(layers) if name in layer.members)
            if indices:
                adapted = [layers[index].members[name] for index in indices]
                scales = tuple(member.layer.scaling[name] for member in adapted)
                dropout = adapted[0].dropout
                seed = self._choice.dropout_seeds[name][self._mask[name]] if dropout else None
                bundles.append(Bundle(start, end, count, indices, scales, dropout, seed))
                for index in indices:
                    for side, letter in zip(factors, "AB", strict=True):
                        side.append(self._choice.factors[f"{layers[index].path}.lora_{letter}.{name}.weight"])
            start = end
        if start != x.numel() // x.shape[-1]:
            raise RuntimeError(f"several adapters: {tuple(x.shape)} does not match {start} tokens")
        return add_adapters(x, frozen, bundles, *factors, pending) if bundles else frozen


def _build_zero_factors(member: FusedLayer) -> tuple[Tensor, Tensor]:
    inputs, outputs, kind = member.down.shape[1], member.up.shape[0], (member.down.dtype, member.down.device)
    return _build_zeros(ZERO_FACTOR_RANK, inputs, *kind), _build_zeros(outputs, ZERO_FACTOR_RANK, *kind)


@cache
def _build_zeros(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(rows, columns, dtype=dtype, device=device)
