"""The forward of layers with several adapters: one frozen product for all rows, each adapter on its own rows.

The frozen product is that of `fused_lora` with factors of zeros, which need no gradient. So every format of the base,
its partitioning and its recomputation are those of a run with one adapter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import ops
from ops.groups import find_groups
from ops.many_adapters import Part, add_adapters
from trainer.config import UserError
from trainer.contract.known_versions import replaces
from trainer.model.expert_adapter import ParamWrapper
from trainer.parallel.engine.adapter_choice import AdapterChoice
from trainer.parallel.engine.layer_gather.shards import find_layer_shards
from trainer.patches.fused_lora import MANY_TOKENS, FusionReport, Group, Member, check_operators, compute, why_not
from trainer.patches.replace import replace

NO_RANK = 8
"""Columns of the factors of zeros: the fewest that the kernels read."""


@replaces("the forward of PEFT's LoRA layers, with several adapters")
def fuse_many(
    model: nn.Module,
    choice: AdapterChoice,
    backend: Literal["auto", "cuda", "reference"],
    *,
    forward: Callable[[], object],
    separate: bool,
    tokens: int,
) -> FusionReport:
    """Replace the forward of every adapted layer; see `fused_lora.fuse`. Raises UserError for a layer without it."""
    chosen = ops.load(backend)
    layers = _find_members(model, choice)
    together = [(path,) for path in layers] if separate else find_groups(
        {path: layer.module for path, layer in layers.items()}, forward
    )  # fmt: skip
    report = FusionReport(len(layers), f"{chosen.name}, {len(choice.names)} adapters: {chosen.reason}")
    for paths in together:
        alike = len({layers[path].any_member.kind[:-1] for path in paths}) == 1
        report.groups += [tuple(paths)] if alike else [(path,) for path in paths]
    alone: list[Group] = []
    for paths in report.groups:
        alone += _install([layers[path] for path in paths], choice)
    check_operators(alone, find_layer_shards(model), many=chosen.name == "cuda" and tokens >= MANY_TOKENS)
    return report


@dataclass
class _Layer:
    """An adapted layer and its members by adapter."""

    module: Any
    members: dict[str, Member]

    @property
    def any_member(self) -> Member:
        return next(iter(self.members.values()))


def _find_members(model: nn.Module, choice: AdapterChoice) -> dict[str, _Layer]:
    from peft.tuners.lora import LoraLayer

    found: dict[str, _Layer] = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        if isinstance(layer, ParamWrapper):
            raise UserError(f"adapters: {path} is an expert, which has one adapter; set lora.experts: false")
        module: Any = layer
        members: dict[str, Member] = {}
        active = module._active_adapter
        for name in choice.names:
            if name not in module.lora_A:
                continue
            module._active_adapter = [name]
            if reason := why_not(module):
                raise UserError(f"adapters: {path}: {reason}; leave it out with lora.exclude_modules")
            members[name] = Member(module)
            members[name].apply_when_active(active)
        module._active_adapter = active
        found[path] = _Layer(module, members)
    return found


def _install(layers: Sequence[_Layer], choice: AdapterChoice) -> list[Group]:
    """Install the forward of layers that share an input; return the group of each adapter alone."""
    common = _CommonGroup(layers, choice)
    alone: dict[str, tuple[Group, list[int]]] = {}
    for name in choice.names:
        indices = [index for index, layer in enumerate(layers) if name in layer.members]
        if indices:
            alone[name] = Group([layers[index].members[name] for index in indices]), indices
    for index, layer in enumerate(layers):
        replace(layer.module, "forward", _build_forward(index, layer, choice, common, alone))
    return [group for group, _ in alone.values()]


def _build_forward(
    index: int, layer: _Layer, choice: AdapterChoice, common: "_CommonGroup", alone: dict[str, tuple[Group, list[int]]]
) -> Callable[..., Tensor]:
    module, plain = layer.module, layer.module.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if module._disable_adapters:
            result: Tensor = plain(x, *args, **kwargs)
            return result
        name = choice.selected
        if name is not None and name not in layer.members:
            base_output: Tensor = module.base_layer(x, *args, **kwargs)
            return base_output
        if args or kwargs or not layer.any_member.applies_to(x):
            raise RuntimeError(f"a layer with several adapters got {x.dtype} {tuple(x.shape)} and {[*args, *kwargs]}")
        if name is None:
            return common.output(index, x)
        group, indices = alone[name]
        return group.output(indices.index(index), x)

    return forward


class _CommonGroup(Group):
    """Layers that share their input, in a pass with rows of several adapters."""

    def __init__(self, layers: Sequence[_Layer], choice: AdapterChoice) -> None:
        super().__init__([layer.any_member for layer in layers])
        self._layers, self._choice = list(layers), choice
        self._mask: dict[str, int] = {}
        """Adapter -> index of this group's dropout mask within a pass."""
        for name in choice.names:
            if any(name in layer.members and layer.members[name].has_dropout for layer in layers):
                self._mask[name] = choice.draws.get(name, 0)
                choice.draws[name] = self._mask[name] + 1

    def compute(self, members: Sequence[Member], x: Tensor) -> list[Tensor]:
        layers = [self._layers[self.members.index(member)] for member in members]
        zeros = [_zeros(member) for member in members]
        frozen = compute(members, x, ([down for down, _ in zeros], [up for _, up in zeros]))
        parts: list[Part] = []
        downs: list[Tensor] = []
        ups: list[Tensor] = []
        start = 0
        for name, tokens in self._choice.rows:
            own = tuple(index for index, layer in enumerate(layers) if name in layer.members)
            if own:
                chosen = [layers[index].members[name] for index in own]
                scales = tuple(member.layer.scaling[name] for member in chosen)
                ranks = tuple(len(member.down) for member in chosen)
                dropout = chosen[0].dropout
                seed = self._choice.seeds[name][self._mask[name]] if dropout else None
                parts.append(Part(start, start + tokens, own, scales, ranks, dropout, seed))
                downs += [member.down for member in chosen]
                ups += [member.up for member in chosen]
            start += tokens
        if start != x.numel() // x.shape[-1]:
            raise RuntimeError(f"a layer with several adapters got {tuple(x.shape)} for {start} tokens of a batch")
        return add_adapters(x, frozen, parts, downs, ups) if parts else frozen


_ZEROS: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}


def _zeros(member: Member) -> tuple[Tensor, Tensor]:
    """Return factors of zeros for a layer, the same for all layers of its shape."""
    wide, out = member.down.shape[1], member.up.shape[0]
    key = wide, out, member.down.dtype, member.down.device
    if key not in _ZEROS:
        kind: dict[str, Any] = {"dtype": member.down.dtype, "device": member.down.device}
        _ZEROS[key] = torch.zeros(NO_RANK, wide, **kind), torch.zeros(out, NO_RANK, **kind)
    return _ZEROS[key]
