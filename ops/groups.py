"""Find shared-input projections: modules that read the same input in one forward, such as q, k, v or gate and up.

They are found by observing one forward of the model, not from a list of names: modules form a group if they share a
parent and are called once each, one directly after the other, with the same tensor (the same storage, shape and
version).
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ops.lora import MAX_GROUP

_Call = tuple[str, tuple[Any, ...]]
"""The name of a module that was called, and what identifies its input."""


def _record_calls(modules: Mapping[str, nn.Module], forward: Callable[[], object]) -> list[_Call]:
    """Return the calls of `modules` (by qualified name), in order, while `forward()` runs once without gradients."""
    calls: list[_Call] = []
    kept: list[Tensor] = []  # keeps addresses unique: a freed one may be reused

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else next(iter(kwargs.values()), None)
            if not isinstance(x, Tensor) or len(args) + len(kwargs) != 1:
                calls.append((name, ("called with more than one input", len(calls))))
                return
            kept.append(x)
            storage = x.untyped_storage()._cdata, x.storage_offset()
            calls.append((name, (*storage, tuple(x.shape), x.stride(), x.dtype, x._version)))

        return record

    handles = [module.register_forward_pre_hook(hook(name), with_kwargs=True) for name, module in modules.items()]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def find_groups(modules: Mapping[str, nn.Module], forward: Callable[[], object]) -> list[tuple[str, ...]]:
    """Return the names of `modules` in groups; one that shares its input with no neighbour is a group of one.

    `modules` maps qualified names to the adapted linears of a model; `forward` runs it once on any batch.
    """
    calls = _record_calls(modules, forward)
    times = Counter(name for name, _ in calls)
    groups: list[list[str]] = []
    previous: tuple[Any, ...] | None = None
    for name, key in calls:
        if times[name] > 1:
            previous = None
            continue
        this = name.rpartition(".")[0], key
        if this == previous and len(groups[-1]) < MAX_GROUP:
            groups[-1].append(name)
        else:
            groups.append([name])
        previous = this
    return [*map(tuple, groups), *((name,) for name in modules if times[name] != 1)]
