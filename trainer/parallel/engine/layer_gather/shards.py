"""Shard the frozen base model over the ranks, and gather it one decoder layer ahead (per-layer ZeRO-3).

DeepSpeed's own stage 3 gathers parameter by parameter from hooks on every module, which is too slow on the host for an
adapted model. Here one all-gather (unit.py) fetches a full layer while the previous layer computes, and DeepSpeed's
engine runs at stage 2 on the adapter, which every rank holds in full.

At most two units are gathered, the current and the next one. In the backward pass the gradient of a layer's output
shows that all later layers are done. With gradient checkpointing the recomputation comes after that, while the layer's
weights are gathered.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from trainer.contract.known_versions import replaces
from trainer.parallel.engine.layer_gather.unit import ShardedUnit, WaitContext, find_slots
from trainer.parallel.engine.partitioned import exclude_from_broadcast

MIN_ELEMENTS = 100_000
"""Minimum number of elements for sharding a parameter outside blocks; the final norm is smaller."""


@dataclass(frozen=True)
class UnitPlan:
    path: str
    last_module: str
    """The module below `path` that is loaded last."""
    parameters: tuple[str, ...]


def plan_units(model: Any, keep_whole: Sequence[str] = (), *, keep_embeddings: bool = False) -> list[UnitPlan]:
    """Plan a shard unit for each block of the outermost module lists and each other module with large weights.

    A model may list its blocks itself (`list_shard_blocks`). Not sharded: modules with a name ending in one of
    `keep_whole`, the embeddings if `keep_embeddings` is set, weights shared with these or between blocks, and small
    weights outside blocks. A weight with two names (a tied head) belongs to its first module.
    """
    modules = dict(model.named_modules())
    whole = [module for path, module in modules.items() if path.endswith(tuple(keep_whole))]
    if keep_embeddings:
        whole += filter(None, (model.get_input_embeddings(), model.get_output_embeddings()))
    excluded = {id(parameter) for module in whole for parameter in module.parameters()}
    if hasattr(model, "list_shard_blocks"):
        return _plan_blocks(modules, model.list_shard_blocks(), excluded)
    lists = [path for path, module in modules.items() if isinstance(module, nn.ModuleList)]
    outermost = [path for path in lists if not path.startswith(tuple(f"{other}." for other in lists))]
    return _plan_blocks(modules, [path for path in modules if path.rpartition(".")[0] in outermost], excluded)


def _plan_blocks(modules: dict[str, Any], blocks: Sequence[str], excluded: set[int]) -> list[UnitPlan]:
    counts = Counter(id(parameter) for block in blocks for parameter in modules[block].parameters())
    excluded |= {identity for identity, count in counts.items() if count > 1}
    units = []
    for block in blocks:
        parameters = modules[block].named_parameters(prefix=block)
        names = [name for name, parameter in parameters if id(parameter) not in excluded]
        # A module shared by several blocks appears in `modules` once, under the first block, which loads it.
        last = [path for path in modules if f"{path}.".startswith(f"{block}.")][-1]
        units.append(UnitPlan(block, last, tuple(names)))
    excluded |= set(counts)
    for path, module in modules.items():
        large = {
            name: id(parameter)
            for name, parameter in module.named_parameters(prefix=path, recurse=False)
            if id(parameter) not in excluded and parameter.numel() >= MIN_ELEMENTS
        }
        units.append(UnitPlan(path, path, tuple(large)))
        excluded |= set(large.values())
    return [unit for unit in units if unit.parameters]


@dataclass(frozen=True)
class _Step:
    unit: ShardedUnit
    module: nn.Module
    has_backward: bool
    """False for embeddings, where the gradient ends."""


class LayerShards:
    """A model's shard units in the order of its forward pass, and the hooks that gather them just in time."""

    def __init__(
        self,
        device: torch.device,
        *,
        in_host_memory: bool = False,
        pin_memory: bool = True,
        keep_whole: Sequence[str] = (),
        keep_embeddings: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Store the options; the ranks of `group` (default: all ranks) together hold one copy of the base model.

        Modules with a name ending in one of `keep_whole` are not sharded, because they are fully trained. If
        `keep_embeddings` is set, the embedding and the head are not sharded, because they will be resized.
        """
        self.units: list[ShardedUnit] = []
        self._build_unit = partial(
            ShardedUnit, device=device, in_host_memory=in_host_memory, pin_memory=pin_memory, group=group
        )
        self._in_host_memory = in_host_memory
        self._keep_whole = tuple(keep_whole)
        self._keep_embeddings = keep_embeddings
        self._group = group
        self._plan: dict[str, UnitPlan] = {}
        self._modules: set[int] = set()
        self._steps: list[_Step] = []
        self._current: ShardedUnit | None = None
        self._in_backward = False

    def plan(self, model: nn.Module) -> None:
        units = plan_units(model, self._keep_whole, keep_embeddings=self._keep_embeddings)
        self._plan = {unit.last_module: unit for unit in units}

    def shard_if_filled(self, model: nn.Module, path: str) -> None:
        """Shard a unit once its last module (`path`) has been loaded; every rank must call this for every module."""
        plan = self._plan.pop(path, None)
        if plan is None:
            return
        parameters = [model.get_parameter(name) for name in plan.parameters]
        slots = [slot for parameter in parameters for slot in find_slots(parameter)]
        unit = self._build_unit(name=plan.path, slots=slots)
        self.units.append(unit)
        self._modules.add(id(model.get_submodule(plan.path)))
        for parameter in parameters:
            parameter.requires_grad_(False)
            exclude_from_broadcast(parameter)
            parameter.shard_unit = unit  # type: ignore[attr-defined]

    @replaces("the all-gather of a frozen base in ZeRO stage 3")
    def attach(self, model: Any) -> None:
        """Register hooks on the modules that read the units; call this before the adapted model's first forward."""
        assert not self._plan, f"not loaded: {sorted(self._plan)}"
        self._steps = list(self._find_steps(model))
        for index, step in enumerate(self._steps):
            before, after = partial(self._before_forward, index), partial(self._after_forward, index)
            step.module.register_forward_pre_hook(before)
            step.module.register_forward_hook(after)
        model.layer_shards = self

    def _find_steps(self, model: nn.Module) -> Iterator[_Step]:
        """Yield the outermost modules that may read a unit's weights without calling a child.

        These are decoder layers, adapted linear layers, and modules that directly own a weight of the unit.
        """
        from peft.tuners.lora import LoraLayer

        yielded: tuple[str, ...] = ()
        for path, module in model.named_modules():
            unit = next(filter(None, map(get_unit, module.parameters())), None)
            if unit is None or path.startswith(yielded or "."):
                continue
            reads_own = any(map(get_unit, module.parameters(recurse=False)))
            if reads_own or id(module) in self._modules or isinstance(module, LoraLayer):
                yielded = (*yielded, f"{path}.")
                base = module.get_base_layer() if isinstance(module, LoraLayer) else module
                yield _Step(unit, module, has_backward=not isinstance(base, nn.Embedding))

    @contextmanager
    def gather(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Gather the weights of these modules within the block; every rank must enter it."""
        parameters = (parameter for module in modules for parameter in module.parameters())
        units = [unit for unit in dict.fromkeys(map(get_unit, parameters)) if unit is not None]
        for unit in units:
            unit.start()
            unit.wait()
        try:
            yield
        finally:
            for unit in units:
                if unit is not self._current:
                    unit.free()

    def time_waits(self, waiting: WaitContext) -> None:
        """Enter `waiting()` whenever the compute stream (on a CPU, the calling thread) waits for an all-gather."""
        for unit in self.units:
            unit.waiting = waiting

    def format_summary(self) -> str:
        held = sum(unit.bytes_held for unit in self.units) / 2**30
        largest = max((unit.bytes_gathered for unit in self.units), default=0) / 2**30
        where = "in host memory" if self._in_host_memory else "on its device"
        among = "" if self._group is None else f" over {dist.get_world_size(self._group)} ranks"
        return (
            f"base: sharded in {len(self.units)} units{among}, {held:.2f} GiB per rank {where}; gathered one "
            f"unit ahead, at most two units of {largest:.2f} GiB at a time (zero.gather: layer)"
        )

    def _before_forward(self, index: int, *_: Any) -> None:
        # Within a backward pass this is a recomputation, which proceeds from the last layer to the first.
        self._enter(index, backward=_is_in_backward())

    def _after_forward(self, index: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if _is_in_backward():
            return
        if torch.is_grad_enabled():
            if self._steps[index].has_backward:
                for tensor in tree_leaves(output):
                    if isinstance(tensor, Tensor) and tensor.requires_grad:
                        # Once this gradient is complete, all later layers are done with their weights.
                        tensor.register_hook(lambda _: self._enter(index, backward=True))
        elif index == len(self._steps) - 1:
            self._end_pass()

    def _enter(self, index: int, *, backward: bool) -> None:
        """Wait for this step's unit, start gathering the next one, and free all others."""
        unit, next_unit = self._steps[index].unit, self._find_next(index, backward)
        for other in self.units:
            if other is not unit and other is not next_unit:
                other.free()
        unit.start()
        unit.wait()
        self._current = unit
        if next_unit is not None:
            next_unit.start()
        if backward and not self._in_backward:
            Variable._execution_engine.queue_callback(self._end_pass)
        self._in_backward = backward

    def _find_next(self, index: int, backward: bool) -> ShardedUnit | None:
        """Return the unit needed next: by a later step of this pass or, after the last step, by the following pass."""
        if not backward and index + 1 < len(self._steps):
            return self._steps[index + 1].unit
        if backward or torch.is_grad_enabled():
            return self._steps[index - 1].unit if index else None
        return self._steps[0].unit

    def _end_pass(self) -> None:
        """Free all units except the one that the next pass begins with."""
        self._in_backward = False
        for unit in self.units:
            if unit is not self._steps[0].unit:
                unit.free()
        self._current = None


def get_layer_shards(model: Any) -> LayerShards | None:
    return getattr(model, "layer_shards", None)


def get_unit(weight: Tensor) -> ShardedUnit | None:
    return getattr(weight, "shard_unit", None)


def _is_in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
