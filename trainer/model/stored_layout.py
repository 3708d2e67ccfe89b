"""Map the parameters of a model to stored tensors, and convert the stored tensors.

Checkpoints of MoE models store one tensor per expert, or one for all experts, and their names differ from the model's.
transformers' mapping defines which tensors make up a parameter. Here its conversions run on one parameter at a time, or
one expert if possible, so that only the tensors needed for it are in memory.
"""

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.config.errors import UserError, format_count
from trainer.contract.known_versions import require

BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of the two parts of an MXFP4 tensor


class StoredTensors(Protocol):
    """Reads tensors by name, on demand."""

    def read_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors."""

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Return a tensor, or only `tensor[index : index + 1]` if `index` is given."""


@dataclass(frozen=True)
class StoredParameter:
    """Maps a parameter to the names of its stored tensors, and to their conversion."""

    target: str
    names: dict[str, tuple[str, ...]]
    """Names of the stored tensors by their pattern in transformers; `_blocks` and `_scales` for MXFP4."""
    converter: Any = None
    """The WeightConverter of transformers; None if the parameter is stored unchanged."""
    key: str = ""
    """Name of the converted parameter in transformers: the converter's first target."""
    shape_model: Any = None
    """Provides the parameter shapes that conversions read."""
    config: Any = None

    @property
    def is_mxfp4(self) -> bool:
        return set(self.names) == {BLOCKS, SCALES}

    @property
    def is_separable_by_expert(self) -> bool:
        if self.converter is None:
            return True
        operations = list(self.converter.operations)
        counts = {len(names) for names in self.names.values()}
        if type(operations[0]).__name__ == "MergeModulelist":
            return operations[0].dim == 0 and all(map(_keeps_first_dimension, operations[1:]))
        return counts == {1} and all(map(_keeps_first_dimension, operations))

    def read(self, files: StoredTensors, expert: int | None = None) -> Tensor:
        """Return the parameter's values, or only `values[expert : expert + 1]` if `expert` is given."""
        assert not self.is_mxfp4, self.target
        if self.converter is None:
            return files.read(self.names[self.target][0], expert)
        parts = {}
        for pattern, names in self.names.items():
            if expert is not None and len(names) > 1:
                parts[pattern] = [files.read(names[expert])]
            else:
                merges_experts = type(self.converter.operations[0]).__name__ == "MergeModulelist"
                parts[pattern] = [files.read(name, None if merges_experts else expert) for name in names]
        return self._convert(parts)[self.target]

    def find_targets(self, shapes: dict[str, tuple[int, ...]]) -> list[str]:
        """Return the names of the parameters that the conversion builds (several if it splits a tensor)."""
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
        converted = converter.convert(self.key, model=self.shape_model, config=self.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


class _Shapes:
    """Provides a model's parameter shapes to conversions that read them while the model is being filled."""

    def __init__(self, model: Any) -> None:
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty(self._shapes[name], device="meta")


def map_stored_tensors(model: Any, files: StoredTensors, base_model: str) -> dict[str, StoredParameter]:
    """Map every parameter and persistent buffer of a model on the meta device to its stored tensors.

    Tied parameters appear under all of their names. Raises UserError if a parameter is not stored.
    """
    shapes, prefix = files.read_shapes(), f"{model.base_model_prefix}."
    layout: dict[str, StoredParameter] = {}
    for target, _ in model.named_parameters():
        # MXFP4 tensors are named with or without the model's prefix.
        for name in (target, target.removeprefix(prefix), prefix + target):
            if name + BLOCKS in shapes and name + SCALES in shapes:
                layout[target] = StoredParameter(target, {BLOCKS: (name + BLOCKS,), SCALES: (name + SCALES,)})
    for stored in _find_by_mapping(model, shapes):
        for target in [stored.target] if stored.converter is None else stored.find_targets(shapes):
            layout.setdefault(target, replace(stored, target=target))
    tied = set(require(model, "all_tied_weights_keys", "transformers"))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    by_id = {id(parameters[name]): stored for name, stored in layout.items() if name in parameters}
    missing = [name for name, value in parameters.items() if id(value) not in by_id and name not in tied]
    if missing:
        raise UserError(
            f"base_model={base_model}: {format_count(len(missing), 'weight')} missing (first: {missing[0]}); "
            "use config.json and weights from the same model, or download the model again"
        )
    return layout | {name: by_id[id(parameter)] for name, parameter in parameters.items()}


def _find_by_mapping(model: Any, shapes: dict[str, tuple[int, ...]]) -> list[StoredParameter]:
    """Collect the stored tensors as transformers' `convert_and_load_state_dict_in_model` does."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    converters_by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    model_names, prefix, shape_model = model.state_dict(), model.base_model_prefix, _Shapes(model)
    names: dict[str, dict[str, list[str]]] = {}
    for name in sorted(shapes, key=dot_natural_key):
        key, pattern = rename_source_key(name, renamings, converters, prefix, model_names)
        if key not in model_names and name in model_names:
            key, pattern = rename_source_key(name, [], [], prefix, model_names)
        if key in model_names:
            patterns = names.setdefault(key, {})
            if pattern is None or pattern in converters_by_pattern:
                patterns.setdefault(pattern or key, []).append(name)
    layout = []
    for key, patterns in names.items():
        converter = next(filter(None, map(converters_by_pattern.get, patterns)), None)
        sources = {pattern: tuple(stored) for pattern, stored in patterns.items()}
        layout.append(StoredParameter(key, sources, converter, key, shape_model, model.config))
    return layout


def _keeps_first_dimension(operation: Any) -> bool:
    """Return whether a transformers operation treats the entries of the first dimension independently."""
    kind = type(operation).__name__
    if kind == "Transpose":
        return not operation.check_dims and 0 not in (operation.dim0, operation.dim1)
    return kind in ("Concatenate", "Chunk", "Interleave") and operation.dim > 0
