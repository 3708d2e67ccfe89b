"""Fingerprint a base model's weights by headers, file sizes and a sample of the bytes.

Reads 64 KiB of every 16 MiB (64 MB of a 16 GB model), and files under 16 MiB completely. Changes outside the samples
go undetected if names, shapes and sizes stay the same.
"""

import json
import re
from pathlib import Path
from typing import Any

import xxhash

from trainer.config import ModelSection
from trainer.config.files import read_json, read_json_or_default
from trainer.model.model_source import find_cached_file
from trainer.model.published_shapes import is_random
from trainer.model.tensor_files import INDEX, WeightIndex

SAMPLE_BYTES, SAMPLE_INTERVAL = 1 << 16, 1 << 24
# Settings that may change whenever a model is saved, but do not affect its results.
VOLATILE = ("transformers_version", "_diffusers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")
PIPELINE, SCHEDULER = "model_index.json", "scheduler"
FROZEN_PARTS = (SCHEDULER, "vae", "text_encoder", "text_encoder_2", "text_encoder_3")
WEIGHT_KEYS = ("name", "weights", "commit")
"""Keys of a fingerprint. The first key that two fingerprints share determines whether their weights are the same."""


def fingerprint_base(base_model: str, section: ModelSection) -> dict[str, str]:
    """Return a base model's fingerprint; empty if the model is not on this machine.

    A random model has only a `name`. Other models have hashes of their `weights` and `config` (a single file
    only of its `weights`), and the Hub `commit` if they are in the Hub's cache. Image pipelines also have a
    hash per frozen part, and models with remote code a hash per Python file.
    """
    if is_random(base_model):
        return {"name": base_model}
    folder, fingerprint = Path(base_model).expanduser(), {}
    if folder.is_file():  # an image model; its file may have been renamed
        digest = xxhash.xxh3_128()
        _add_file(digest, folder, "")
        return {"weights": digest.hexdigest()}
    if not folder.is_dir():
        cached = find_cached_file(base_model, "config.json", section.revision)
        if cached is None:
            return {}
        folder = cached.parent
        fingerprint["commit"] = folder.name
    if (folder / PIPELINE).is_file():
        return fingerprint | _hash_pipeline(folder)
    if (folder / "config.json").is_file():
        fingerprint["config"] = _hash_settings(folder / "config.json")
    if section.trust_remote_code:
        for prefix, code in {"": folder, **_find_external_code(folder)}.items():
            fingerprint |= {
                prefix + file.name: xxhash.xxh3_128_hexdigest(file.read_bytes()) for file in code.glob("*.py")
            }
    return fingerprint | _hash_weights(_find_weight_files(folder))


def _find_external_code(folder: Path) -> dict[str, Path]:
    """Return cached code folders of `auto_map` values (`owner/repo--module.Class`), keyed by `owner/repo/`."""
    settings = (
        read_json_or_default(folder / name, dict[str, Any], {}) for name in ("config.json", "tokenizer_config.json")
    )
    references = re.findall(r"'([^']+)--(\w+)\.", str([section.get("auto_map") for section in settings]))
    return {
        f"{repository}/": cached.parent
        for repository, module in references
        if (cached := find_cached_file(repository, f"{module}.py", None))
    }


def _hash_pipeline(folder: Path) -> dict[str, str]:
    """Return hashes of a pipeline's denoiser, and of each complete frozen part: scheduler, VAE and text encoders."""
    denoiser = next((folder / name for name in ("unet", "transformer") if (folder / name).is_dir()), folder)
    hashes, config = {}, denoiser / "config.json"
    if config.is_file():
        hashes["config"] = xxhash.xxh3_128_hexdigest(config.read_bytes())
    hashes |= _hash_weights(sorted(denoiser.glob("diffusion_pytorch_model*.safetensors")))
    for part in FROZEN_PARTS:
        settings, weights = sorted((folder / part).glob("*config.json")), _find_weight_files(folder / part)
        if settings and (weights or part == SCHEDULER):
            hashes[part] = ".".join([*map(_hash_settings, settings), *_hash_weights(weights).values()])
    return hashes


def _hash_settings(file: Path) -> str:
    stable = {name: value for name, value in read_json(file).items() if name not in VOLATILE}
    return xxhash.xxh3_128_hexdigest(json.dumps(stable, sort_keys=True).encode())


def find_changed_part(recorded: dict[str, str], current: dict[str, str]) -> str | None:
    """Return the first key outside WEIGHT_KEYS that has different values in the two fingerprints, or None."""
    return next(
        (key for key in recorded if key not in WEIGHT_KEYS and current.get(key, recorded[key]) != recorded[key]), None
    )


def is_same_base(recorded: dict[str, str], current: dict[str, str]) -> bool | None:
    """Return whether two fingerprints belong to the same base model; None if their weights cannot be compared."""
    if find_changed_part(recorded, current):
        return False
    for key in WEIGHT_KEYS:
        if key in recorded and key in current:
            return recorded[key] == current[key]
    return None


def _find_weight_files(folder: Path) -> list[Path]:
    """Return a model's weight files; an empty list if any is missing."""
    index = folder / INDEX
    if index.is_file():
        files = sorted(folder / name for name in set(read_json(index, WeightIndex).weight_map.values()))
        return files if all(file.is_file() for file in files) else []
    return sorted(folder.glob("*.safetensors"))


def _hash_weights(files: list[Path]) -> dict[str, str]:
    digest = xxhash.xxh3_128()
    for file in files:
        _add_file(digest, file, file.name)
    return {"weights": digest.hexdigest()} if files else {}


def _add_file(digest: xxhash.xxh3_128, file: Path, name: str) -> None:
    size = file.stat().st_size
    digest.update(f"{name}:{size}\n".encode())
    with file.open("rb", buffering=0) as stream:
        if size <= SAMPLE_INTERVAL:
            digest.update(stream.read())
            return
        length = int.from_bytes(stream.read(8), "little")  # length of the header (names, shapes and offsets)
        digest.update(stream.read(min(length, SAMPLE_INTERVAL)))
        for start in (*range(0, size, SAMPLE_INTERVAL), max(0, size - SAMPLE_BYTES)):
            stream.seek(start)
            digest.update(stream.read(SAMPLE_BYTES))
