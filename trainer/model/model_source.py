"""Check the source of a model or tokenizer, and explain why it cannot be read."""

import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt

from trainer.config import UserError
from trainer.config.adapter_settings import SETTINGS_FILE, read_adapter_settings
from trainer.config.errors import to_text
from trainer.config.files import (
    UnreadableFileError,
    check_type,
    describe_broken_link,
    read_bytes,
    read_json,
    read_json_or_default,
    read_text,
)
from trainer.config.paths import find_similar_path

MAX_NAME_BYTES = 255  # the limit for file names on common file systems
WEIGHT_SUFFIXES = (".safetensors", ".ckpt", ".gguf", ".bin", ".pt", ".pth")
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
HUB_NAME_IN_TEXT = re.compile(
    r"(?:hf://|(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/)(\w[\w.-]*/\w[\w.-]*)(?:[/@:?].*)?"
    r"|(\w[\w.-]*/\w[\w.-]*)(?:/|[@:].*)?",
    re.ASCII,
)
"""A Hub ID in a URL, or with a slash or a revision after it."""
MAX_LAYERS = 10_000
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")


Size = Annotated[StrictInt, Field(gt=0)]
PositiveNumber = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
VALUES: dict[str, Any] = {
    "(hidden|vocab)_size|num_(attention_heads|key_value_heads|beams|labels)": Size,
    "num_hidden_layers": Annotated[Size, Field(le=MAX_LAYERS)],
    "intermediate_size|head_dim|top_k|min_length|no_repeat_ngram_size": Annotated[StrictInt, Field(ge=0)],
    "max_position_embeddings": PositiveNumber | Literal[-1],
    "(rms_|layer_)?norm_eps|layer_norm_epsilon": Annotated[PositiveNumber, Field(le=1)],
    "rope_theta|factor|repetition_penalty|model_max_length": PositiveNumber,
    "temperature": Annotated[float, Field(ge=0, strict=True)],
    "(top|min|typical)_p": Annotated[float, Field(ge=0, le=1, strict=True)],
    "(torch_)?dtype": str,
    "(padding|truncation)_side": Literal["left", "right"],
    ".*_token_id": StrictInt,
    "(attention|attn|hidden|resid|embd)_(dropout|pdrop)": Annotated[float, Field(ge=0, lt=1, strict=True)],
}
"""Types of values in config.json, its sections, and the files next to it, except for lists and mappings (`SHAPES`)."""
SHAPES: dict[str, Any] = {
    r".*quantization_config\.format": str,
    r".*quantization_config\.(bits|w_bit|group_size)": StrictInt,
    r".*quantization_config\.(desc_act|zero_point)": StrictBool,
    r".*quantization_config\.weight_block_size": tuple[int, int],
    r".*quantization_config\.(modules_to_not_convert|ignored_layers|ignore)": list[str],
    r".*quantization_config\.(dynamic|config_groups)": dict[str, dict[str, Any] | None],
    r".*quantization_config(\.sparsity_config|\.config_groups\..*\.weights)?": dict[str, Any],
    "auto_map|rope_(parameters|scaling)|text_config|id2label|label2id|added_tokens_decoder": dict[str, Any],
    "architectures|layer_types|model_input_names": list[str],
    "additional_special_tokens": list[Any],
    "extra_special_tokens": list[Any] | dict[str, Any],
    "eos_token_id": StrictInt | list[StrictInt],
    "bad_words_ids": list[list[int]],
    "model_type|tokenizer_class": str,
    "(bos|eos|pad|unk)_token": str | dict[str, Any],
    "chat_template": str | list[dict[str, Any]] | dict[str, str],
}
COPY_FIX = "copy the file from the original model"
SOURCE_FIX = "use OWNER/NAME on the Hub, such as Qwen/Qwen2.5-7B, or a folder"


def check_source(setting: str, name: str) -> None:
    """Raise UserError unless the name of a model or tokenizer is an existing folder or a valid Hub ID."""
    prefix = f"{setting}={name}"
    path, is_url = Path(name), "://" in name
    longest = max(len(os.fsencode(part)) for part in name.split("/"))
    if longest > MAX_NAME_BYTES:
        raise UserError(f"{setting}={name[:40]}...: contains a name of {longest} bytes; use at most {MAX_NAME_BYTES}")
    try:
        if path.is_file():
            files = {"model.tokenizer": TOKENIZER_FILES[0], "lora.adapter_path": SETTINGS_FILE}
            raise UserError(f"{prefix}: is a file; use the folder with {files.get(setting, 'config.json')}")
        if path.is_dir():
            os.listdir(path)
            return
    except PermissionError:
        raise UserError(
            f"{prefix}: no permission to read this folder; fix its permissions, or copy the model"
        ) from None
    except (OSError, ValueError) as error:  # such as a null byte
        raise UserError(f"{prefix}: cannot be read ({error}); {SOURCE_FIX}") from None
    if path.suffix in WEIGHT_SUFFIXES:
        raise UserError(f"{prefix}: no such file; fix the path")
    if is_url or not HUB_NAME.fullmatch(name):
        nearest = next((parent for parent in path.absolute().parents if parent.is_dir()), Path("/"))
        problem = "is a URL" if is_url else describe_broken_link(path) or f"no such folder ({nearest} exists)"
        similar, fix = find_similar_path(path), SOURCE_FIX
        if found := HUB_NAME_IN_TEXT.fullmatch(name.strip().replace("\\", "/")):
            fix = (
                f"write {setting}{' ' if setting.startswith('-') else ': '}{found[1] or found[2]}"
                + ", and the revision in model.revision" * ("@" in name)
            )
        elif similar:
            fix = f"did you mean {similar}?"
        raise UserError(f"{prefix}: {problem}; {fix}")


def check_config_file(base_model: str, revision: str) -> None:
    """Raise UserError if config.json or a file next to it is invalid, in a folder or on the Hub."""
    folder, prefix = Path(base_model), f"base_model={base_model}"
    names = ("config.json", "generation_config.json")
    files = _find_files(base_model, revision, names)
    if "config.json" not in files:
        if not folder.is_dir():
            return  # transformers explains why it cannot be downloaded
        raise UserError(f"{prefix}: {_describe_missing_config(folder)}")
    if (folder / SETTINGS_FILE).exists():
        raise UserError(
            f"{prefix}: also contains an adapter; transformers would load the adapter and its base model instead of "
            f"these weights; move {SETTINGS_FILE} to a separate folder"
        )
    from transformers import CONFIG_MAPPING, GenerationConfig, __version__

    settings, generation = (_read_settings(prefix, files[name]) if name in files else {} for name in names)
    size: Any = settings.get("vocab_size") or (settings.get("text_config") or {}).get("vocab_size")
    for name, key in product(names, ("eos_token_id", "pad_token_id")) if isinstance(size, int) else ():
        ids = (settings if name == names[0] else generation).get(key)
        if any(isinstance(each, int) and each >= size for each in (ids if isinstance(ids, list) else [ids])):
            raise UserError(f"{prefix}: {name}: {key}={to_text(ids)}: must be below vocab_size={size}; {COPY_FIX}")
    try:
        GenerationConfig(**generation)
    except (TypeError, ValueError) as error:
        raise UserError(f"{prefix}: generation_config.json: {_shorten_reason(error)}; fix this key") from None
    if "AutoConfig" in (settings.get("auto_map") or {}):
        return  # the model has its own code
    kind = settings.get("model_type")
    if kind is None:
        raise UserError(f"{prefix}: config.json has no model_type; {COPY_FIX}")
    if kind not in CONFIG_MAPPING:
        raise UserError(
            f"{prefix}: config.json has model_type {kind}, which transformers {__version__} does not support; "
            "fix it, or install a newer transformers"
        )


def check_tokenizer_files(prefix: str, source: str, revision: str) -> None:
    """Raise UserError if a small file of a tokenizer, in a folder or on the Hub, is invalid."""
    names = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
    for file in _find_files(source, revision, names).values():
        _read_settings(prefix, file)


def _find_files(source: str, revision: str, names: Iterable[str]) -> dict[str, Path]:
    """Return the existing files of a folder, or of a repository on the Hub, after downloading them."""
    from transformers.utils import cached_file

    folder, files = Path(source), dict[str, Path]()
    for name in names:
        with suppress(OSError, ValueError):
            files[name] = folder / name if folder.is_dir() else Path(str(cached_file(source, name, revision=revision)))
    return {name: file for name, file in files.items() if file.exists()}


def _check_values(settings: dict[str, Any], section: str = "") -> None:
    for key, value in settings.items():
        if isinstance(value, dict):
            _check_values(value, f"{section}{key}.")
        types = SHAPES if isinstance(value, dict | list) else VALUES | SHAPES
        for pattern, type_ in types.items() if value is not None else ():
            if re.fullmatch(pattern, key) or re.fullmatch(pattern, section + key):
                check_type({f"{section}{key}": value}, Path("config.json"), dict[str, type_])  # type: ignore[valid-type]


def find_cached_file(name: str, file: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):
        path = try_to_load_from_cache(name, file, revision=revision)
        return Path(path) if isinstance(path, str) else None
    return None


def _read_settings(prefix: str, file: Path) -> dict[str, Any]:
    """Read and check a model's JSON file, or only check a chat template. Raises UserError if it is invalid."""
    try:
        if read_bytes(file).startswith(b"\xef\xbb\xbf"):
            raise UnreadableFileError(file, "begins with a byte-order mark, which transformers cannot read")
        settings = read_json(file) if file.suffix == ".json" else {"chat_template": read_text(file)}
        _check_values(settings)
        return settings
    except UnreadableFileError as fault:
        raise UserError(f"{prefix}: {file.name}: {fault.problem}; {COPY_FIX}") from None


def _describe_missing_config(folder: Path) -> str:
    if (folder / SETTINGS_FILE).exists():
        base = "the adapter's base model"
        with suppress(UserError):
            base = read_adapter_settings(folder).get("base_model_name_or_path") or base
        return f"contains only an adapter; set base_model: {base}, and lora.adapter_path: {folder} to continue it"
    if (folder / "model_index.json").exists():
        return "contains an image model; set task: auto, or use the folder of a language model"
    inner = sorted(child.parent.name for child in folder.glob("*/config.json"))
    if inner:
        return f"has no config.json, but its subfolder {inner[0]} has one; use {folder / inner[0]}"
    return "has no config.json; use the folder of a saved model"


def build_load_error(
    setting: str, name: str, error: Exception, *, tokenizer: bool = False, model_config: Any = None
) -> UserError:
    """Return a UserError for a configuration or tokenizer that transformers could not load.

    Pass `model_config` if the configuration was loaded, but no model could be built from it.
    """
    prefix = f"{setting}={name}"
    reason = _describe_config_fault(error, json.dumps(read_json_or_default(Path(name) / "config.json", Any, {})))
    if isinstance(error, ImportError):
        return UserError(f"{prefix}: {str(error).strip().partition(' but')[0]}; install it with pip")
    if "trust_remote_code" in str(error):
        return UserError(f"{prefix}: requires custom code; review it, then set model.trust_remote_code: true")
    if not (folder := Path(name)).is_dir() and model_config is None:
        failure = _describe_hub_failure(name, error)
        similar = f" (did you mean {near}?)" if (near := find_similar_path(folder)) else ""
        return UserError(f"{prefix}: not a local folder{similar}, not in the Hub's cache, and {failure}")
    if not tokenizer:
        return UserError(f"{prefix}: config.json is unusable ({reason}); {COPY_FIX}")
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        return build_missing_tokenizer_error(setting, name)
    for file in _find_files(name, "", ("tokenizer.json", "added_tokens.json")).values():
        try:
            read_json(file)
        except UnreadableFileError as fault:
            return UserError(f"{prefix}: {file.name}: {fault.problem}; {COPY_FIX}")
    return UserError(f"{prefix}: its tokenizer cannot be read ({reason}); copy its files again, or set model.tokenizer")


def _describe_config_fault(error: Exception, settings: str) -> str:
    """Return what transformers rejects in the JSON text `settings`, with the key and its value if it names the key."""
    unknown = next(iter(error.args), "a key") if isinstance(error, KeyError) else getattr(error, "name", None)
    if key := re.search(rf'"(\w+)": "{re.escape(str(unknown))}"', settings):
        return f"{key[1]}={unknown}: unknown to transformers"
    reason = f"{unknown} is missing" if isinstance(error, KeyError) else _shorten_reason(error, 2000)
    text = re.sub(r"^Class .*?: \w+: |^Validation error for field '(\w+)': \w+(: )", r"\1\2", reason)
    text = text.replace("Padding_idx must be within num_embeddings", "pad_token_id: must be below vocab_size")
    name, _, problem = text.partition(": ")
    value = re.search(rf'"{re.escape(name)}": ("[^"]*"|\[.*?\]|\{{.*?\}}|[^,}}]+)', settings)
    if types := re.search(r"any type in \((.*?)\)\.|expected (\w+), got", problem):
        problem = "must be of type " + re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", types[1] or types[2])
    return _shorten_reason(f"{name}={value[1]}: {problem}" if value else text)


def build_missing_tokenizer_error(setting: str, name: str) -> UserError:
    source = "the folder" if Path(name).is_dir() else "its repository"
    files = ", ".join(TOKENIZER_FILES[:3])
    fix = "use another" if setting == "model.tokenizer" else "set model.tokenizer"
    return UserError(f"{setting}={name}: {source} has no tokenizer ({files}); add its files, or {fix}")


def _describe_hub_failure(name: str, error: Exception) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    offline_fix = f"run `hf download {name}` on a machine with network access, and use the folder that it prints"
    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set; {offline_fix}"
    causes = _list_causes(error)
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return f"its repository is gated; accept its license at https://huggingface.co/{name}, then run `hf auth login`"
    if any(isinstance(cause, RevisionNotFoundError) for cause in causes):
        return "the Hub has no such revision; check model.revision"
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        return "its repository does not exist or is private; check the name, or run `hf auth login`"
    return f"the download from the Hub failed ({_shorten_reason(error)}); check the name, or {offline_fix}"


def _list_causes(error: BaseException | None) -> list[BaseException]:
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes


def _shorten_reason(error: Any, limit: int = 200) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # Errors from pydantic and huggingface_hub name the field in the first line and the reason in the second.
    text = " ".join(lines[:2]).rstrip(".")
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
