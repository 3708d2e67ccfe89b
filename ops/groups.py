"""Finds siblings: modules that read the very same input in one forward, such as q, k, v or gate and up.

They are found by watching one forward of the model, not from a list of names: modules are siblings if they share a
parent and are called once each, one directly after the other, with the same tensor (the same storage, shape and
version). A module for which this does not hold is returned with the reason.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Group:
    """Modules to compute together, in the order of their calls, by qualified name."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Alone:
    """A module that stays alone, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class _Call:
    name: str
    key: tuple[Any, ...]


def observe(model: nn.Module, modules: Mapping[str, nn.Module], forward: Callable[[], object]) -> list[_Call]:
    """The calls of `modules` (by qualified name) while `forward()` runs the model once, in order.

    The hooks are removed again whatever happens; gradients are not recorded.
    """
    calls: list[_Call] = []
    kept: list[Tensor] = []  # a freed input's address may be given to the next tensor

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else next(iter(kwargs.values()), None)
            if not isinstance(x, Tensor) or len(args) + len(kwargs) != 1:
                calls.append(_Call(name, ("called with more than one input", len(calls))))
                return
            kept.append(x)
            calls.append(_Call(name, (x.data_ptr(), tuple(x.shape), x.stride(), x.dtype, x._version)))

        return record

    handles = [module.register_forward_pre_hook(hook(name), with_kwargs=True) for name, module in modules.items()]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def find_groups(
    model: nn.Module, modules: Mapping[str, nn.Module], forward: Callable[[], object], limit: int = 16
) -> tuple[list[Group], list[Alone]]:
    """Groups of siblings among `modules`, and the modules that stay alone with the reason.

    `modules` maps qualified names in `model` to the adapted linears; `forward` runs the model once on any batch.

    Raises:
        ValueError: a name that is not in the model, or `limit` below 1.
    """
    known = dict(model.named_modules())
    missing = [name for name in modules if name not in known]
    if missing or limit < 1:
        raise ValueError(f"modules not in the model: {missing[:3]}; limit={limit}: at least 1")
    calls = observe(model, modules, forward)
    times = {name: sum(call.name == name for call in calls) for name in modules}
    groups: list[Group] = []
    alone = [Alone(name, "not called in the observed forward") for name in modules if times[name] == 0]
    alone += [Alone(name, f"called {n} times in one forward") for name, n in times.items() if n > 1]
    once = [call for call in calls if times[call.name] == 1]
    run: list[_Call] = []
    for call in [*once, None]:
        if run and call is not None and _joins(run, call, calls, limit):
            run.append(call)
            continue
        if len(run) > 1:
            groups.append(Group(tuple(member.name for member in run)))
        elif run:
            alone.append(Alone(run[0].name, "no neighbour reads the same input"))
        run = [] if call is None else [call]
    return groups, alone


def _joins(run: list[_Call], call: _Call, calls: list[_Call], limit: int) -> bool:
    """Whether a call continues the run: same input, same parent, nothing adapted called in between."""
    adjacent = calls.index(call) == calls.index(run[-1]) + 1
    same_parent = call.name.rpartition(".")[0] == run[-1].name.rpartition(".")[0]
    return adjacent and same_parent and call.key == run[0].key and len(run) < limit
