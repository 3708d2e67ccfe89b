"""Cached image features, computed by a frozen vision tower; each file is named after a hash of its image."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file, save_file

from trainer.config import UserError
from trainer.contract.whole_files import apply_umask
from trainer.data.image_parts import read_stored_image

GRID = "image_grid_thw"
"""Input to Qwen models that determines the positions of image tokens."""


@dataclass(frozen=True)
class TowerOutput:
    """Image features of a batch, with the attribute names that transformers models read."""

    pooler_output: Any = None
    deepstack_features: Any = None
    last_hidden_state: Any = None
    """Only set for models without `pooler_output` (Llama 4)."""

    @classmethod
    def from_model(cls, output: Any) -> "TowerOutput":
        pooled = getattr(output, "pooler_output", None)
        if isinstance(pooled, list | tuple):  # an entry for each image or tile
            pooled = (torch.cat(tuple(pooled)),)
        state = output.last_hidden_state if pooled is None else None
        return cls(pooled, getattr(output, "deepstack_features", None), state)

    def list_tensors(self) -> dict[str, torch.Tensor]:
        return {name: each for key, value in vars(self).items() for name, each in _flatten(key, value)}

    def map_tensors(self, function: Callable[[Any], Any]) -> "TowerOutput":
        return TowerOutput(*(_map_tensors(value, function) for value in vars(self).values()))


class FeatureFiles:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get_path(self, stored: bytes) -> Path:
        """Return the path to a stored image's features (see `read_stored_image`); the file may not exist yet."""
        name = xxhash.xxh3_128_hexdigest(read_stored_image(stored)[0])
        return self.folder / name[:2] / f"{name}.safetensors"

    def write(self, path: Path, output: TowerOutput, grid: torch.Tensor | None) -> None:
        """Write the vision tower's output for one image. Raises UserError if the file cannot be written."""
        tensors = output.list_tensors() | ({} if grid is None else {GRID: grid})
        temporary = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: value.cpu().contiguous().clone() for name, value in tensors.items()}, temporary)
            apply_umask(temporary)
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            problem = f"image features cannot be written ({error.strerror or error})"
            setting = f"dataset.cache_dir={self.folder.parent.parent}"
            raise UserError(f"{setting}: {problem}; free some space, or set vision.cache: false") from None

    def read(self, stored: Sequence[bytes]) -> tuple[TowerOutput, torch.Tensor | None]:
        """Return the features of images, in order, and their grids (None if the model uses none)."""
        files = [load_file(self.get_path(image)) for image in stored]
        tensors = {name: torch.cat([file[name] for file in files]) for name in files[0]}
        return TowerOutput(*(_unflatten(tensors, name) for name in TowerOutput.__dataclass_fields__)), tensors.get(GRID)


def _map_tensors(value: Any, function: Callable[[Any], Any]) -> Any:
    return tuple(_map_tensors(entry, function) for entry in value) if isinstance(value, tuple) else function(value)


def _flatten(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested lists with their names; `name.0` is the first entry of a list."""
    if isinstance(value, torch.Tensor):
        yield name, value
    for index, entry in enumerate(value if isinstance(value, list | tuple) else ()):
        yield from _flatten(f"{name}.{index}", entry)


def _unflatten(tensors: dict[str, torch.Tensor], name: str) -> Any:
    """Undo `_flatten`; return None if no tensor has this name."""
    if name in tensors:
        return tensors[name]
    entries = {int(key[len(name) + 1 :].partition(".")[0]) for key in tensors if key.startswith(f"{name}.")}
    return tuple(_unflatten(tensors, f"{name}.{at}") for at in sorted(entries)) or None
