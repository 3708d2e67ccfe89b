"""The files of a tokenizer as bytes, which are written unchanged with every checkpoint.

An unmodified tokenizer keeps the files of its base, byte for byte: transformers 5 may save the class name
`TokenizersBackend` and a list of special tokens, which transformers 4 and servers that use it cannot load.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from trainer.config import ModelSection, UserError
from trainer.config.files import parse_json, read_bytes
from trainer.model.base import load_tokenizer

SETTINGS = "tokenizer_config.json"
NAMES = (
    SETTINGS, "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt",
    "merges.txt",
)  # fmt: skip
"""Files from which a tokenizer can be loaded."""
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of processors of images and videos."""
LOCAL_SETTINGS = ("is_local", "local_files_only", "name_or_path")
"""Settings in which transformers records where it loaded a tokenizer from."""


def tokenizer_files(tokenizer: Any, revision: str | None = None) -> dict[str, bytes]:
    """Return the files of a tokenizer by name: those it was loaded from, if they still describe it.

    `revision` is the revision of its repository on the hub.
    """
    processors = _source_files(tokenizer.name_or_path, revision, PROCESSORS)
    try:
        own = _make_portable(_source_files(tokenizer.name_or_path, revision))
        if own and _identity(_load(own)) == _identity(tokenizer):
            return own | processors
    except UserError:
        pass  # files that need custom code, or more files than are copied
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = (path for path in Path(folder).rglob("*") if path.is_file())
        return processors | _make_portable({str(file.relative_to(folder)): file.read_bytes() for file in files})


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the files into a folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def _source_files(source: str, revision: str | None, names: Sequence[str] = NAMES) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in names if source else ():
        path: Any = Path(source, name)
        if not Path(source).is_dir():
            with suppress(HFValidationError):
                path = try_to_load_from_cache(source, name, revision=revision)
        if isinstance(path, str | Path):  # otherwise the cache knows that the repository has no such file
            with suppress(FileNotFoundError):
                found[name] = read_bytes(Path(path))
    return found


def _load(files: Mapping[str, bytes]) -> Any:
    """Load the tokenizer as a run does: from a folder without the model's config.json."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(files, Path(folder))
        return load_tokenizer(folder, ModelSection())


def _identity(tokenizer: Any) -> tuple[Any, ...]:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    kept = {name: value for name, value in backend.items() if name not in ("padding", "truncation")}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return kept, special, tokenizer.chat_template


def _make_portable(files: dict[str, bytes]) -> dict[str, bytes]:
    """Rewrite settings that only transformers 5 can load, and drop local paths."""
    settings: dict[str, Any] = parse_json(files[SETTINGS], Path(SETTINGS)) if SETTINGS in files else {}
    kept = {name: value for name, value in settings.items() if name not in LOCAL_SETTINGS}
    if kept.get("tokenizer_class") == "TokenizersBackend":
        kept["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(kept.get("extra_special_tokens"), list):
        kept["additional_special_tokens"] = kept.pop("extra_special_tokens")
    if kept == settings:
        return files
    return files | {SETTINGS: (json.dumps(kept, indent=2, ensure_ascii=False) + "\n").encode()}
