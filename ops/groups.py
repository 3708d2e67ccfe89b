"""Find shared-input projections: modules that read the same input in one forward, such as q, k, v or gate and up.

They are found by observing one forward of the model, not from a list of names: modules form a group if they share a
parent and are called once each, one directly after the other, with the same tensor (the same storage, shape and
version). Modules for which this does not hold are returned with the reason.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Group:
    """Modules to compute together, by qualified name, in the order of their calls."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Ungrouped:
    """A module that is computed separately, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class _Call:
    name: str
    key: tuple[Any, ...]


def record_calls(model: nn.Module, modules: Mapping[str, nn.Module], forward: Callable[[], object]) -> list[_Call]:
    """Return the calls of `modules` (by qualified name), in order, while `forward()` runs once without gradients."""
    calls: list[_Call] = []
    kept: list[Tensor] = []  # keeps addresses unique: a freed one may be reused

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else next(iter(kwargs.values()), None)
            if not isinstance(x, Tensor) or len(args) + len(kwargs) != 1:
                calls.append(_Call(name, ("called with more than one input", len(calls))))
                return
            kept.append(x)
            calls.append(
                _Call(
                    name,
                    (x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape), x.stride(), x.dtype, x._version),
                )
            )

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
) -> tuple[list[Group], list[Ungrouped]]:
    """Return the groups of shared-input projections among `modules`, and the other modules with the reason.

    `modules` maps qualified names in `model` to the adapted linears; `forward` runs the model once on any batch.

    Raises:
        ValueError: a name that is not in the model, or `limit` below 1.
    """
    known = dict(model.named_modules())
    missing = [name for name in modules if name not in known]
    if missing or limit < 1:
        raise ValueError(f"modules not in the model: {missing[:3]}; limit={limit}: at least 1")
    calls = record_calls(model, modules, forward)
    times = {name: sum(call.name == name for call in calls) for name in modules}
    groups: list[Group] = []
    alone = [Ungrouped(name, "not called in the observed forward") for name in modules if times[name] == 0]
    alone += [Ungrouped(name, f"called {n} times in one forward") for name, n in times.items() if n > 1]
    once = [call for call in calls if times[call.name] == 1]
    run: list[_Call] = []
    for call in [*once, None]:
        if run and call is not None and _continues_run(run, call, calls, limit):
            run.append(call)
            continue
        if len(run) > 1:
            groups.append(Group(tuple(member.name for member in run)))
        elif run:
            alone.append(Ungrouped(run[0].name, "no neighbour reads the same input"))
        run = [] if call is None else [call]
    return groups, alone


def _continues_run(run: list[_Call], call: _Call, calls: list[_Call], limit: int) -> bool:
    """Return whether a call continues the run: same input, same parent, no other adapted module called in between."""
    adjacent = calls.index(call) == calls.index(run[-1]) + 1
    same_parent = call.name.rpartition(".")[0] == run[-1].name.rpartition(".")[0]
    return adjacent and same_parent and call.key == run[0].key and len(run) < limit
