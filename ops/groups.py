"""Find shared-input projections: modules that read the same input, such as q, k, v or gate and up.

Observes one forward pass of the model instead of using a list of names. Modules form a group if they have
the same parent and are called once each, consecutively, with the same tensor (storage, shape and version).
"""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ops.lora import MAX_GROUP_SIZE

_Call = tuple[str, tuple[Any, ...]]
"""The name of a called module and the identity of its input."""


def _record_calls(modules: Mapping[str, nn.Module], forward: Callable[[], object]) -> list[_Call]:
    """Run `forward()` once without gradients, and return the calls to `modules` (by qualified name) in order."""
    calls: list[_Call] = []
    inputs: list[Tensor] = []  # kept alive, because a freed address may be reused

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else next(iter(kwargs.values()), None)
            if not isinstance(x, Tensor) or len(args) + len(kwargs) != 1:
                calls.append((name, ("called with more than one input", len(calls))))
                return
            inputs.append(x)
            storage = x.untyped_storage()._cdata, x.storage_offset()
            calls.append((name, (*storage, tuple(x.shape), x.stride(), x.dtype, x._version)))

        return record

    with ExitStack() as hooks, torch.no_grad():
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_pre_hook(hook(name), with_kwargs=True))
        forward()
    return calls


def find_groups(modules: Mapping[str, nn.Module], forward: Callable[[], object]) -> list[tuple[str, ...]]:
    """Return the names of `modules` in groups; a module that does not share its input is a group of one.

    `modules` maps qualified names to the adapted linear layers of a model; `forward` runs the model once on any batch.
    """
    calls = _record_calls(modules, forward)
    call_counts = Counter(name for name, _ in calls)
    groups: list[list[str]] = []
    previous_key: tuple[Any, ...] | None = None
    for name, key in calls:
        if call_counts[name] > 1:
            previous_key = None
            continue
        group_key = name.rpartition(".")[0], key
        if group_key == previous_key and len(groups[-1]) < MAX_GROUP_SIZE:
            groups[-1].append(name)
        else:
            groups.append([name])
        previous_key = group_key
    return [*map(tuple, groups), *((name,) for name in modules if call_counts[name] != 1)]
