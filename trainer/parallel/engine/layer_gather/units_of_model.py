"""Choose the tensors of a model that are gathered together, from the module tree, before weights are loaded."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

SMALL = 100_000
"""Parameters with fewer elements than this are not sharded outside of blocks, such as the last norm."""


@dataclass(frozen=True)
class UnitPlan:
    """The parameters of one module that will be gathered together."""

    path: str
    last_module: str
    """The last module below `path` in the order of loading."""
    parameters: tuple[str, ...]


def plan_units(model: Any, keep_whole: Sequence[str] = (), *, keep_embeddings: bool = False) -> list[UnitPlan]:
    """Return a unit for every block of the outermost module lists, and for every module with large weights elsewhere.

    A model may list its blocks itself (`gathered_blocks`). Not sharded are the modules with names that end in one of
    `keep_whole`, the embeddings with `keep_embeddings`, weights shared with those or between blocks, and small weights
    outside of blocks. A weight with two names (a tied head) belongs to the first module that has it.
    """
    modules = dict(model.named_modules())
    if hasattr(model, "gathered_blocks"):
        return _units(modules, model.gathered_blocks(), _kept(model, keep_whole, keep_embeddings))
    lists = [path for path, module in modules.items() if isinstance(module, nn.ModuleList)]
    outermost = [path for path in lists if not path.startswith(tuple(f"{other}." for other in lists))]
    blocks = [path for path in modules if path.rpartition(".")[0] in outermost]
    return _units(modules, blocks, _kept(model, keep_whole, keep_embeddings))


def _units(modules: dict[str, Any], blocks: Sequence[str], kept: set[int]) -> list[UnitPlan]:
    in_blocks = Counter(id(parameter) for block in blocks for parameter in modules[block].parameters())
    kept |= {identity for identity, times in in_blocks.items() if times > 1}
    units = []
    for block in blocks:
        own = modules[block].named_parameters(prefix=block)
        names = [name for name, parameter in own if id(parameter) not in kept]
        # Among all modules: a module shared by blocks is filled with the first of them.
        last = [path for path in modules if f"{path}.".startswith(f"{block}.")][-1]
        units.append(UnitPlan(block, last, tuple(names)))
    kept |= set(in_blocks)
    for path, module in modules.items():
        large = {
            name: id(parameter)
            for name, parameter in module.named_parameters(prefix=path, recurse=False)
            if id(parameter) not in kept and parameter.numel() >= SMALL
        }
        units.append(UnitPlan(path, path, tuple(large)))
        kept |= set(large.values())
    return [unit for unit in units if unit.parameters]


def _kept(model: Any, keep_whole: Sequence[str], keep_embeddings: bool) -> set[int]:
    modules = [module for path, module in model.named_modules() if path.endswith(tuple(keep_whole))]
    if keep_embeddings:
        modules += [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module]
    return {id(parameter) for module in modules for parameter in module.parameters()}
