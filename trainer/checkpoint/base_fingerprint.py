"""A fingerprint of a base model's weights from headers, sizes and a sample of the bytes.

64 KiB of every 16 MiB are read, 64 MB for a model of 16 GB; files under 16 MiB are read completely. A change between
the samples that keeps names, shapes and sizes is not detected.
"""

import json
import re
from pathlib import Path
from typing import Any

import xxhash

from trainer.config import ModelSection
from trainer.config.files import find_json, read_json
from trainer.model.published_shapes import is_random
from trainer.model.tensor_files import INDEX, Index

SAMPLE, EVERY = 1 << 16, 1 << 24
# Rewritten whenever a model is saved, without effect on what it computes.
VOLATILE = ("transformers_version", "_diffusers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")
PIPELINE, SCHEDULER = "model_index.json", "scheduler"
FROZEN_PARTS = (SCHEDULER, "vae", "text_encoder", "text_encoder_2", "text_encoder_3")
SAME_WEIGHTS = ("name", "weights", "commit")
"""Keys of a fingerprint. The first that two fingerprints share decides whether their weights are the same."""


def fingerprint_base(base_model: str, section: ModelSection) -> dict[str, str]:
    """Return what identifies a base: `name` of a random one, `commit` on the hub, hashes of its `weights` and `config`.

    Further hashes are named after the frozen parts of an image pipeline, and the files of Python code that is run.
    Empty if the base is not on this machine yet.
    """
    if is_random(base_model):
        return {"name": base_model}
    folder, found = Path(base_model).expanduser(), {}
    if folder.is_file():  # an image model, which may be renamed
        digest = xxhash.xxh3_128()
        _add_file(digest, folder, "")
        return {"weights": digest.hexdigest()}
    if not folder.is_dir():
        cached = cached_folder(base_model, "config.json", section.revision or "main")
        if cached is None:
            return {}
        folder = cached
        found["commit"] = folder.name
    if (folder / PIPELINE).is_file():
        return found | _hash_denoiser(folder) | _hash_frozen_parts(folder)
    if (folder / "config.json").is_file():
        found["config"] = _hash_settings(folder / "config.json")
    if section.trust_remote_code:
        for prefix, at in {"": folder, **_find_other_code(folder)}.items():
            found |= {prefix + file.name: xxhash.xxh3_128_hexdigest(file.read_bytes()) for file in at.glob("*.py")}
    return found | _hash_weights(_weight_files(folder))


def _find_other_code(folder: Path) -> dict[str, Path]:
    """Return the folders of other repositories' code, which `auto_map` names as `owner/repo--module.Class`."""
    settings = (find_json(folder / name, dict[str, Any], {}) for name in ("config.json", "tokenizer_config.json"))
    named = re.findall(r"'([^']+)--(\w+)\.", str([each.get("auto_map") for each in settings]))
    return {f"{at}/": found for at, module in named if (found := cached_folder(at, f"{module}.py", "main"))}


def _hash_denoiser(folder: Path) -> dict[str, str]:
    """Return the hashes of an image pipeline's denoiser, the part that adapters are trained on."""
    denoiser = next((folder / name for name in ("unet", "transformer") if (folder / name).is_dir()), folder)
    found, config = {}, denoiser / "config.json"
    if config.is_file():
        found["config"] = xxhash.xxh3_128_hexdigest(config.read_bytes())
    return found | _hash_weights(sorted(denoiser.glob("diffusion_pytorch_model*.safetensors")))


def _hash_frozen_parts(folder: Path) -> dict[str, str]:
    """Return the hashes of a pipeline's scheduler, VAE and text encoders, without incomplete ones."""
    found = {}
    for part in FROZEN_PARTS:
        settings, weights = sorted((folder / part).glob("*config.json")), _weight_files(folder / part)
        if settings and (weights or part == SCHEDULER):
            found[part] = ".".join([*map(_hash_settings, settings), *_hash_weights(weights).values()])
    return found


def _hash_settings(file: Path) -> str:
    kept = {name: value for name, value in read_json(file).items() if name not in VOLATILE}
    return xxhash.xxh3_128_hexdigest(json.dumps(kept, sort_keys=True).encode())


def find_changed_part(one: dict[str, str], other: dict[str, str]) -> str | None:
    """Return where two fingerprints differ apart from the weights: `config`, a frozen part or a file of code."""
    return next((key for key in one if key not in SAME_WEIGHTS and other.get(key, one[key]) != one[key]), None)


def is_same_base(one: dict[str, str], other: dict[str, str]) -> bool | None:
    """Return whether two fingerprints are of the same base; None if their weights cannot be compared."""
    if find_changed_part(one, other):
        return False
    for key in SAME_WEIGHTS:
        if key in one and key in other:
            return one[key] == other[key]
    return None


def cached_folder(name: str, file: str, revision: str) -> Path | None:
    """Return the folder of the hub's cache that holds a file of a repository; None if it was not downloaded."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, file, revision=revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _weight_files(folder: Path) -> list[Path]:
    """Return the model's weight files; empty if one is missing."""
    index = folder / INDEX
    if index.is_file():
        names = set(read_json(index, Index).weight_map.values())
        files = sorted(folder / name for name in names)
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
        if size <= EVERY:
            digest.update(stream.read())
            return
        length = int.from_bytes(stream.read(8), "little")  # of the header, which holds names, shapes and offsets
        digest.update(stream.read(min(length, EVERY)))
        for start in (*range(0, size, EVERY), max(0, size - SAMPLE)):
            stream.seek(start)
            digest.update(stream.read(SAMPLE))
