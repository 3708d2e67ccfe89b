"""Check the source of a model or tokenizer, and explain why it cannot be read."""

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt

from trainer.config import UserError
from trainer.config.adapter_settings import SETTINGS_FILE, read_adapter_settings
from trainer.config.files import UnreadableFileError, check_type, describe_broken_link, read_json, read_json_or_default
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


@dataclass(frozen=True)
class LayerGroup:
    weights: dict[str, Any] | None = None


@dataclass(frozen=True)
class QuantizationKeys:
    """Declares the keys of `quantization_config` that we read, for all quantization libraries."""

    format: str | None = None
    bits: StrictInt | None = None
    w_bit: StrictInt | None = None
    desc_act: StrictBool | None = None
    zero_point: StrictBool | None = None
    group_size: StrictInt | None = None
    dynamic: dict[str, dict[str, Any] | None] | None = None
    weight_block_size: tuple[int, int] | None = None
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None
    ignore: list[str] | None = None
    config_groups: dict[str, LayerGroup | None] | None = None
    sparsity_config: dict[str, Any] | None = None


Size = Annotated[StrictInt, Field(gt=0)]
PositiveNumber = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
VALUES: dict[str, Any] = {
    "(hidden|vocab)_size|num_(attention_heads|key_value_heads|beams)": Size,
    "intermediate_size|head_dim|top_k|min_length|no_repeat_ngram_size": Annotated[StrictInt, Field(ge=0)],
    "max_position_embeddings": PositiveNumber | Literal[-1],
    "(rms_|layer_)?norm_eps|layer_norm_epsilon": Annotated[PositiveNumber, Field(le=1)],
    "rope_theta|factor|repetition_penalty|model_max_length": PositiveNumber,
    "temperature": Annotated[float, Field(ge=0, strict=True)],
    "(top|min|typical)_p": Annotated[float, Field(ge=0, le=1, strict=True)],
    "(torch_)?dtype": str,
    ".*_token_id": StrictInt,
    "(attention|attn|hidden|resid|embd)_(dropout|pdrop)": Annotated[float, Field(ge=0, lt=1, strict=True)],
}
"""Types of the keys of config.json, its sections, and the files next to it that transformers does not check."""


@dataclass(frozen=True)
class ConfigKeys:
    """Declares the keys of config.json that we read. transformers reads the rest."""

    num_hidden_layers: Annotated[Size, Field(le=MAX_LAYERS)] | None = None
    model_type: str | None = None
    architectures: list[str] | None = None
    auto_map: dict[str, Any] | None = None
    quantization_config: QuantizationKeys | None = None


@dataclass(frozen=True)
class GenerationKeys:
    eos_token_id: StrictInt | list[StrictInt] | None = None
    bad_words_ids: list[list[int]] | None = None


@dataclass(frozen=True)
class TokenizerKeys:
    tokenizer_class: str | None = None
    chat_template: str | list[dict[str, Any]] | dict[str, str] | None = None


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


def check_config_file(base_model: str) -> None:
    folder, prefix = Path(base_model), f"base_model={base_model}"
    if not folder.is_dir():
        return
    file = folder / "config.json"
    if not file.exists():
        raise UserError(f"{prefix}: {_describe_missing_config(folder)}")
    if (folder / SETTINGS_FILE).exists():
        raise UserError(
            f"{prefix}: also contains an adapter; transformers would load the adapter and its base model instead of "
            f"these weights; move {SETTINGS_FILE} to a separate folder"
        )
    from transformers import CONFIG_MAPPING, GenerationConfig, __version__

    settings = read_settings(prefix, file, ConfigKeys)
    for name, schema in (("generation_config.json", GenerationKeys), ("tokenizer_config.json", TokenizerKeys)):
        if (folder / name).exists():
            read_settings(prefix, folder / name, schema)
    try:
        GenerationConfig(**read_json_or_default(folder / "generation_config.json", Any, {}))
    except (TypeError, ValueError) as error:
        raise UserError(f"{prefix}: generation_config.json: {_shorten_reason(error)}; fix this key") from None
    if settings.auto_map:
        return  # the model has its own code
    kind = settings.model_type
    if kind is None:
        raise UserError(f"{prefix}: config.json has no model_type; copy the file from the original model")
    if kind not in CONFIG_MAPPING:
        raise UserError(
            f"{prefix}: config.json has model_type {kind}, which transformers {__version__} does not support; "
            "fix it, or install a newer transformers"
        )


def _check_values(settings: dict[str, Any], section: str = "") -> None:
    for key, value in settings.items():
        if isinstance(value, dict):
            _check_values(value, f"{section}{key}.")
        for pattern, type_ in VALUES.items() if not isinstance(value, dict | list | None) else ():
            if re.fullmatch(pattern, key):
                check_type({f"{section}{key}": value}, Path("config.json"), dict[str, type_])  # type: ignore[valid-type]


def find_cached_file(name: str, file: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):
        path = try_to_load_from_cache(name, file, revision=revision)
        return Path(path) if isinstance(path, str) else None
    return None


def read_settings(prefix: str, file: Path, schema: Any) -> Any:
    """Read one of a model's settings files. Raises UserError, prefixed with `prefix`, if it is invalid."""
    try:
        _check_values(read_json(file))
        return read_json(file, schema)
    except UnreadableFileError as fault:
        raise UserError(f"{prefix}: {file.name}: {fault.problem}; copy the file from the original model") from None


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
        return UserError(f"{prefix}: config.json is unusable ({reason}); copy the file from the original model")
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        return build_missing_tokenizer_error(setting, name)
    return UserError(f"{prefix}: {_describe_tokenizer_fault(folder, reason)}")


def _describe_config_fault(error: Exception, settings: str) -> str:
    """Return what transformers rejects in the JSON text `settings`, with the key and its value if it names the key."""
    unknown = next(iter(error.args), "a key") if isinstance(error, KeyError) else getattr(error, "name", None)
    if key := re.search(rf'"(\w+)": "{re.escape(str(unknown))}"', settings):
        return f"{key[1]}={unknown}: unknown to transformers"
    reason = f"{unknown} is missing" if isinstance(error, KeyError) else _shorten_reason(error)
    text = re.sub(r"^Class .*?: \w+: |^Validation error for field '(\w+)': \w+(: )", r"\1\2", reason)
    text = text.replace("Padding_idx must be within num_embeddings", "pad_token_id: must be below vocab_size")
    name, _, problem = text.partition(": ")
    value = re.search(rf'"{re.escape(name)}": ("[^"]*"|\[.*?\]|[^,}}]+)', settings)
    if types := re.search(r"any type in \((.*?)\)\.|expected (\w+), got", problem):
        problem = "must be of type " + re.sub(r"<class '([\w.]+)'>", r"\1", types[1] or types[2])
    return f"{name}={value[1]}: {problem}" if value else text


def build_missing_tokenizer_error(setting: str, name: str) -> UserError:
    source = "the folder" if Path(name).is_dir() else "its repository"
    files = ", ".join(TOKENIZER_FILES[:3])
    fix = "use another" if setting == "model.tokenizer" else "set model.tokenizer"
    return UserError(f"{setting}={name}: {source} has no tokenizer ({files}); add its files, or {fix}")


def _describe_tokenizer_fault(folder: Path, reason: str) -> str:
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    for file in (folder / name for name in names):
        try:
            if file.exists():
                read_json(file)
        except UnreadableFileError as fault:
            return f"{file.name}: {fault.problem}; copy the file from the original model"
    return f"its tokenizer cannot be read ({reason}); copy its files again, or set model.tokenizer"


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


def _shorten_reason(error: Any) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # Errors from pydantic and huggingface_hub name the field in the first line and the reason in the second.
    text = " ".join(lines[:2]).rstrip(".")
    return text if len(text) <= 200 else f"{text[:197]}..."
