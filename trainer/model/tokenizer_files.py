"""Collect the files of a tokenizer, which are written with every checkpoint.

The files of an unmodified tokenizer are copied from its source. transformers 5 may save the class name
`TokenizersBackend` and a list of special tokens, which transformers 4, and servers that use it, cannot load.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.config import ModelSection, UserError
from trainer.config.files import parse_json, read_bytes
from trainer.model.base import load_tokenizer
from trainer.model.model_source import find_cached_file

CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILES = (
    CONFIG_FILE, "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt",
    "merges.txt",
)  # fmt: skip
"""Files from which a tokenizer can be loaded."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of image and video processors."""
SOURCE_SETTINGS = ("is_local", "local_files_only", "name_or_path")
"""Settings in which transformers records the source of a tokenizer."""


def read_tokenizer_files(tokenizer: Any, revision: str | None = None) -> dict[str, bytes]:
    """Return the files of a tokenizer and its processor as {file name: content}.

    An unmodified tokenizer's files are copied from its source; a modified tokenizer is saved anew. `revision`
    is the revision of the tokenizer's repository on the Hub.
    """
    processors = _read_source_files(tokenizer.name_or_path, revision, PROCESSOR_FILES)
    with suppress(UserError):  # the tokenizer needs custom code, or more files than TOKENIZER_FILES
        sources = _make_portable(_read_source_files(tokenizer.name_or_path, revision))
        if sources and _build_fingerprint(_load_from_files(sources)) == _build_fingerprint(tokenizer):
            return sources | processors
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = (path for path in Path(folder).rglob("*") if path.is_file())
        return processors | _make_portable({str(file.relative_to(folder)): file.read_bytes() for file in files})


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def _read_source_files(source: str, revision: str | None, names: Sequence[str] = TOKENIZER_FILES) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for name in names if source else ():
        path = Path(source, name) if Path(source).is_dir() else find_cached_file(source, name, revision)
        if path is not None:  # otherwise the repository has no such file
            with suppress(FileNotFoundError):
                files[name] = read_bytes(path)
    return files


def _load_from_files(files: Mapping[str, bytes]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        write_files(files, Path(folder))
        return load_tokenizer(folder, ModelSection())


def _build_fingerprint(tokenizer: Any) -> tuple[Any, ...]:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    settings = {name: value for name, value in backend.items() if name not in ("padding", "truncation")}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return settings, special, tokenizer.chat_template


def _make_portable(files: dict[str, bytes]) -> dict[str, bytes]:
    """Rewrite settings that only transformers 5 can load, and drop local paths."""
    settings: dict[str, Any] = parse_json(files[CONFIG_FILE], Path(CONFIG_FILE)) if CONFIG_FILE in files else {}
    portable = {name: value for name, value in settings.items() if name not in SOURCE_SETTINGS}
    if portable.get("tokenizer_class") == "TokenizersBackend":
        portable["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(portable.get("extra_special_tokens"), list):
        portable["additional_special_tokens"] = portable.pop("extra_special_tokens")
    if portable == settings:
        return files
    return files | {CONFIG_FILE: (json.dumps(portable, indent=2, ensure_ascii=False) + "\n").encode()}
