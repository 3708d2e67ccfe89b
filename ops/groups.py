"""Find shared-input projections: modules that read the same input in one forward, such as q, k, v or gate and up.

They are found by observing one forward of the model, not from a list of names: modules form a group if they share a
parent and are called once each, one directly after the other, with the same tensor (the same storage, shape and
version). Modules for which this does not hold are returned with the reason.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ops.lora import MAX_GROUP

Reason = tuple[str, str]
"""The name of a module, and why it is computed separately."""
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


def find_groups(
    model: nn.Module, modules: Mapping[str, nn.Module], forward: Callable[[], object]
) -> tuple[list[tuple[str, ...]], list[Reason]]:
    """Return the names of shared-input projections among `modules`, in order of their calls, and the other modules.

    `modules` maps qualified names in `model` to the adapted linears; `forward` runs the model once on any batch. Raises
    ValueError for a name that is not in the model.
    """
    known = dict(model.named_modules())
    if missing := [name for name in modules if name not in known]:
        raise ValueError(f"modules not in the model: {missing[:3]}")
    calls = _record_calls(modules, forward)
    times = {name: sum(called == name for called, _ in calls) for name in modules}
    alone = [(name, "not called in the observed forward") for name in modules if times[name] == 0]
    alone += [(name, f"called {n} times in one forward") for name, n in times.items() if n > 1]
    runs: list[list[int]] = []
    for place, (name, key) in enumerate(calls):
        if times[name] != 1:
            continue
        if runs and runs[-1][-1] == place - 1 and len(runs[-1]) < MAX_GROUP:
            first, first_key = calls[runs[-1][0]]
            if name.rpartition(".")[0] == first.rpartition(".")[0] and key == first_key:
                runs[-1].append(place)
                continue
        runs.append([place])
    alone += [(calls[run[0]][0], "no neighbour reads the same input") for run in runs if len(run) == 1]
    return [tuple(calls[place][0] for place in run) for run in runs if len(run) > 1], alone
