"""The stored tensors of each parameter of a model, and the conversion that builds the parameter from them.

Checkpoints of MoE models store one tensor per expert, or one for all, under names of their own. The mapping of
transformers says which tensors make which parameter. Its conversions run here on the tensors of one parameter, or of
one expert if they treat experts separately, so that no more than that is in memory.
"""

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.config import UserError
from trainer.contract.known_versions import require

BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of the two parts of a tensor in MXFP4


class StoredTensors(Protocol):
    """Tensors by name, each read on demand."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors."""

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Return a tensor; with `index`, that slice of its first dimension (kept, of length one)."""


@dataclass(frozen=True)
class Stored:
    """The stored tensors of one parameter, and their conversion."""

    target: str
    names: dict[str, tuple[str, ...]]
    """The stored tensors by their pattern in transformers; `_blocks` and `_scales` for MXFP4."""
    converter: Any = None
    """The conversion of transformers; None if the parameter is stored unchanged."""
    key: str = ""
    """The name of the conversion in transformers: its first target."""
    like: Any = None
    """A substitute for the model, from which conversions read the shapes of parameters."""
    config: Any = None

    @property
    def is_mxfp4(self) -> bool:
        """Whether the values are stored in MXFP4."""
        return set(self.names) == {BLOCKS, SCALES}

    @property
    def by_expert(self) -> bool:
        """Whether one entry of the first dimension can be built without the rest."""
        if self.converter is None:
            return True
        operations = list(self.converter.operations)
        counts = {len(names) for names in self.names.values()}
        if type(operations[0]).__name__ == "MergeModulelist":
            return operations[0].dim == 0 and all(map(_leaves_first_dimension, operations[1:]))
        return counts == {1} and all(map(_leaves_first_dimension, operations))

    def read(self, files: StoredTensors, expert: int | None = None) -> Tensor:
        """Return the parameter's values, or those of one expert (the first dimension is then of length one)."""
        assert not self.is_mxfp4, self.target
        if self.converter is None:
            return files.read(self.names[self.target][0], expert)
        parts = {}
        for pattern, names in self.names.items():
            if expert is not None and len(names) > 1:
                parts[pattern] = [files.read(names[expert])]
            else:
                one_by_one = type(self.converter.operations[0]).__name__ == "MergeModulelist"
                parts[pattern] = [files.read(name, None if one_by_one else expert) for name in names]
        return self._convert(parts)[self.target]

    def targets(self, shapes: dict[str, tuple[int, ...]]) -> list[str]:
        """Return the parameters built by the conversion: several if one tensor is split."""
        empty = {
            pattern: [torch.empty(shapes[name], device="meta") for name in names]
            for pattern, names in self.names.items()
        }
        return list(self._convert(empty))

    def _convert(self, parts: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        converter = deepcopy(self.converter)
        for pattern, tensors in parts.items():
            for name, tensor in zip(self.names[pattern], tensors, strict=False):
                converter.add_tensor(self.key, name, pattern, tensor)
        parts.clear()
        made = converter.convert(self.key, model=self.like, config=self.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class _Shapes:
    """The shapes of a model's parameters, for conversions that read them while the model is being filled."""

    def __init__(self, model: Any) -> None:
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty(self._shapes[name], device="meta")


def stored_layout(model: Any, files: StoredTensors, base_model: str) -> dict[str, Stored]:
    """Map every parameter and stored buffer of an empty model, tied ones under all their names, to its stored tensors.

    Raises UserError if a parameter has none.
    """
    shapes = files.shapes()
    found = _find_mxfp4(model, shapes)
    for stored in _find_by_mapping(model, shapes):
        targets = [stored.target] if stored.converter is None else stored.targets(shapes)
        for target in targets:
            found.setdefault(target, replace(stored, target=target))
    return _add_tied(model, found, base_model)


def _find_by_mapping(model: Any, shapes: dict[str, tuple[int, ...]]) -> list[Stored]:
    """Collect the stored tensors as `convert_and_load_state_dict_in_model` of transformers does."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    converter_of = {pattern: each for each in converters for pattern in each.source_patterns}
    known, prefix, like = model.state_dict(), model.base_model_prefix, _Shapes(model)
    names: dict[str, dict[str, list[str]]] = {}
    for name in sorted(shapes, key=dot_natural_key):
        key, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if key not in known and name in known:
            key, pattern = rename_source_key(name, [], [], prefix, known)
        if key in known:
            patterns = names.setdefault(key, {})
            if pattern is None or pattern in converter_of:
                patterns.setdefault(pattern or key, []).append(name)
    found = []
    for key, patterns in names.items():
        as_tuples = {pattern: tuple(each) for pattern, each in patterns.items()}
        converter = next((converter_of[pattern] for pattern in patterns if pattern in converter_of), None)
        found.append(Stored(key, as_tuples, converter, key, like, model.config))
    return found


def _find_mxfp4(model: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, Stored]:
    """Find the parameters with stored blocks and scales, with or without the model's prefix."""
    prefix, found = f"{model.base_model_prefix}.", {}
    for target, _ in model.named_parameters():
        for name in (target, target.removeprefix(prefix), prefix + target):
            if name + BLOCKS in shapes and name + SCALES in shapes:
                found[target] = Stored(target, {BLOCKS: (name + BLOCKS,), SCALES: (name + SCALES,)})
    return found


def _add_tied(model: Any, found: dict[str, Stored], base_model: str) -> dict[str, Stored]:
    tied = set(require(model, "all_tied_weights_keys", "transformers"))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    by_id = {id(parameters[name]): stored for name, stored in found.items() if name in parameters}
    missing = [name for name, each in parameters.items() if id(each) not in by_id and name not in tied]
    if missing:
        raise UserError(
            f"base_model={base_model}: {len(missing)} weights are in none of its files (first: {missing[0]}); "
            "take config.json and weights from the same model, or download it again"
        )
    return found | {name: by_id[id(parameter)] for name, parameter in parameters.items()}


def _leaves_first_dimension(operation: Any) -> bool:
    """Return whether an operation of transformers treats entries of the first dimension separately and alike."""
    kind = type(operation).__name__
    if kind == "Transpose":
        return not operation.check_dims and 0 not in (operation.dim0, operation.dim1)
    return kind in ("Concatenate", "Chunk", "Interleave") and operation.dim > 0
