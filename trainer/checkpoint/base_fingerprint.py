"""A name for the weights of a base model, without reading them all: headers, sizes, and a sample of the bytes.

64 KiB of every 16 MiB, so that a model of 16 GB costs 64 MB of reading, and a file of less than 16 MiB is read whole. A
change that stays between the samples and changes neither names, shapes nor sizes is not seen.
"""

import json
from pathlib import Path

import xxhash

from trainer.config import ModelSection
from trainer.config.files import read_json
from trainer.model.published_shapes import is_random
from trainer.model.tensor_files import INDEX, Index

SAMPLE, EVERY = 1 << 16, 1 << 24
# Written again by whoever saves a model, and no part of what it computes.
VOLATILE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")
PIPELINE = "model_index.json"


def fingerprint_of_base(base_model: str, section: ModelSection) -> dict[str, str]:
    """What identifies a base: `name` of a random one, `commit` of one of the hub, `weights` and `config` of its files.

    Empty if nothing of it is on this machine yet.
    """
    if is_random(base_model):
        return {"name": base_model}
    folder, found = Path(base_model).expanduser(), {}
    if not folder.is_dir():
        cached = cached_folder(base_model, "config.json", section.revision or "main")
        if cached is None:
            return {}
        folder = cached
        found["commit"] = folder.name
    if (folder / PIPELINE).is_file():
        return found | _of_pipeline(folder)
    config = folder / "config.json"
    if config.is_file():
        settings = read_json(config)
        kept = {name: value for name, value in settings.items() if name not in VOLATILE}
        found["config"] = xxhash.xxh3_128_hexdigest(json.dumps(kept, sort_keys=True).encode())
    return found | _of_weights(_weight_files(folder))


def _of_pipeline(folder: Path) -> dict[str, str]:
    """Of the denoiser of a pipeline of images: the part that an adapter is of."""
    denoiser = next((folder / name for name in ("unet", "transformer") if (folder / name).is_dir()), folder)
    found, config = {}, denoiser / "config.json"
    if config.is_file():
        found["config"] = xxhash.xxh3_128_hexdigest(config.read_bytes())
    return found | _of_weights(sorted(denoiser.glob("diffusion_pytorch_model*.safetensors")))


def same_base(one: dict[str, str], other: dict[str, str]) -> bool | None:
    """Whether two fingerprints are of one base; None if they have nothing in common to be compared by."""
    if "config" in one and "config" in other and one["config"] != other["config"]:
        return False
    for key in ("name", "weights", "commit"):
        if key in one and key in other:
            return one[key] == other[key]
    return None


def cached_folder(name: str, file: str, revision: str) -> Path | None:
    """Return the folder of the hub's cache that holds a repository's file; None if it was not downloaded."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, file, revision=revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _weight_files(folder: Path) -> list[Path]:
    """The model's files, if all of them are there."""
    index = folder / INDEX
    if index.is_file():
        names = set(read_json(index, Index).weight_map.values())
        files = sorted(folder / name for name in names)
        return files if all(file.is_file() for file in files) else []
    return sorted(folder.glob("*.safetensors"))


def _of_weights(files: list[Path]) -> dict[str, str]:
    """Nothing where there are none."""
    digest = xxhash.xxh3_128()
    for file in files:
        _add_file(digest, file)
    return {"weights": digest.hexdigest()} if files else {}


def _add_file(digest: xxhash.xxh3_128, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name}:{size}\n".encode())
    with file.open("rb", buffering=0) as stream:
        if size <= EVERY:
            digest.update(stream.read())
            return
        length = int.from_bytes(stream.read(8), "little")  # of the header, which holds names, shapes and places
        digest.update(stream.read(min(length, EVERY)))
        for start in (*range(0, size, EVERY), max(0, size - SAMPLE)):
            stream.seek(start)
            digest.update(stream.read(SAMPLE))
