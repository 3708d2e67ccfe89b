"""Read the safetensors files of a model or adapter.

Names and shapes come from the headers, which are a few kilobytes; tensors are read on demand.
"""

from pathlib import Path

import torch
from pydantic import BaseModel
from safetensors import safe_open

from trainer.config import ModelSection, UserError
from trainer.config.files import UnreadableFileError, describe_broken_link, read_json, read_safetensors_header
from trainer.model.model_source import find_cached_file

STEM = "model"
WEIGHTS = f"{STEM}.safetensors"
INDEX = f"{STEM}.safetensors.index.json"
# First bytes of other formats found in files named *.safetensors.
OTHER_FORMATS = (
    (b"version https://git-lfs", "is a git-lfs pointer, not the weights; run `git lfs pull` in the repository"),
    (b"GGUF", "is a GGUF file; use the model it was converted from"),
    (b"PK\x03\x04", "is a pickle file, but only safetensors are loaded; convert the file"),
    (b"\x80\x02", "is a pickle file, but only safetensors are loaded; convert the file"),
    (b"<", "is a web page, not the weights; download the file again"),
)


class WeightIndex(BaseModel):
    weight_map: dict[str, str]
    """File names by tensor name."""


class SafetensorsFiles:
    """Reads the tensors of a model's safetensors files by name, on demand."""

    def __init__(self, base_model: str, section: ModelSection, *, stem: str = STEM) -> None:
        """Read the headers of the weight files with this stem. Raises UserError if one is missing or damaged."""
        self._setting = f"base_model={base_model}"
        folder = _find_folder(base_model, section)
        self._files: dict[str, Path] = {}
        self._headers: dict[str, tuple[tuple[int, ...], str]] = {}
        for file in find_weight_files(folder, self._setting, stem=stem):
            try:
                entries, _, _ = read_safetensors_header(file)
            except UnreadableFileError as error:
                raise UserError(f"{self._setting}: {file.name} {_describe_damage(file, error)}") from None
            self._headers |= {name: (tuple(entry.shape), entry.dtype) for name, entry in entries.items()}
            self._files |= dict.fromkeys(entries, file)

    def read_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, (shape, _) in self._headers.items()}

    def read_types(self) -> dict[str, str]:
        """Return the dtypes of all tensors in safetensors' notation (`BF16`, `F8_E4M3`, `U8`)."""
        return {name: kind for name, (_, kind) in self._headers.items()}

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """Return a tensor on the CPU, or only `tensor[index : index + 1]` if `index` is given."""
        with safe_open(str(self._files[name]), framework="pt") as handle:
            if index is None:
                return torch.as_tensor(handle.get_tensor(name))
            return torch.as_tensor(handle.get_slice(name)[index : index + 1])


def check_finite(setting: str, files: SafetensorsFiles, dtype: torch.dtype) -> None:
    """Raise UserError if a tensor has non-finite values, as stored or after conversion to `dtype`."""
    for name, kind in files.read_types().items():
        if not kind.startswith(("F", "BF")):
            continue
        stored = files.read(name).float()
        converted = stored if kind.startswith("F8") else stored.to(dtype)
        if count := int((~torch.isfinite(converted)).sum()):
            problem, fix = f"beyond the range of {dtype}", "use training.precision: bf16"
            if not torch.isfinite(stored).all():
                problem, fix = "NaN or infinite", f"download or copy {files._files[name].name} again"
            raise UserError(f"{setting}: {count:,} of {stored.numel():,} values of {name} are {problem}; {fix}")


def find_weight_files(folder: Path, setting: str, *, stem: str = STEM) -> list[Path]:
    """Return the weight files that transformers or diffusers would load: a single file, or the files in the index.

    Raises UserError, prefixed with `setting`, if files are missing.
    """
    weights = f"{stem}.safetensors"
    if (folder / weights).exists():
        return [folder / weights]
    index = folder / f"{weights}.index.json"
    if not index.exists():
        others = sorted(file.name for file in folder.glob("*.safetensors"))
        if not others:
            raise UserError(f"{setting}: has no .safetensors file; convert the weights to safetensors")
        if link := describe_broken_link(folder / weights):
            raise UserError(f"{setting}: {link}; download or copy the model again")
        problem = f"has {others[0]}, but neither {weights} nor {index.name}"
        raise UserError(f"{setting}: {problem}; copy the missing file from the original model's repository")
    names = _read_index(index, setting)
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise UserError(
            f"{setting}: {missing[0]} is listed in {index.name}, but missing ({len(missing)} of {len(names)} files are "
            "missing); download or copy the model again"
        )
    return [folder / name for name in names]


def _read_index(index: Path, setting: str) -> list[str]:
    try:
        names = sorted(set(read_json(index, WeightIndex).weight_map.values()))
    except UnreadableFileError as error:
        raise UserError(f"{setting}: {index.name} {error.problem}; download or copy it again") from None
    if outside := next((name for name in names if Path(name).is_absolute() or ".." in Path(name).parts), None):
        raise UserError(
            f"{setting}: {index.name} lists {outside}, which is outside its folder; copy that file into the folder"
        )
    return names


def _describe_damage(file: Path, error: UnreadableFileError) -> str:
    try:
        with file.open("rb") as handle:
            beginning = handle.read(64)
    except OSError:  # a folder, or a file without read permission
        beginning = b""
    kinds = (kind for first, kind in OTHER_FORMATS if beginning.startswith(first))
    return next(kinds, f"{error.problem}; download or copy it again")


def has_local_weights(base_model: str, section: ModelSection) -> bool:
    if Path(base_model).is_dir():
        return True
    index = find_cached_file(base_model, INDEX, section.revision)
    if index is None:
        return find_cached_file(base_model, WEIGHTS, section.revision) is not None
    # Missing files are downloaded when the model is loaded.
    return all((index.parent / name).exists() for name in _read_index(index, f"base_model={base_model}"))


def _find_folder(base_model: str, section: ModelSection) -> Path:
    if Path(base_model).is_dir():
        return Path(base_model)
    from huggingface_hub import snapshot_download

    # Other .safetensors files, as in Mistral's repositories, duplicate the weights.
    patterns = ["model*.safetensors", INDEX, "config.json"]
    return Path(
        snapshot_download(base_model, revision=section.revision, allow_patterns=patterns, ignore_patterns=["*/*"])
    )
