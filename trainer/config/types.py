"""Types for settings: numbers, lists of strings, and the frozen base class that rejects unknown keys."""

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from trainer.config.values import parse_value

AUTO = -1  # `auto` in a numeric setting, until the memory estimate replaces it
# Numbers above these upper bounds can only be typos.
Count = Annotated[int, Field(ge=1, le=65_536)]
PositiveInt = Annotated[int, Field(ge=1, le=1_000_000_000)]
Restarts = Annotated[int, Field(ge=0, le=100_000)]
StepsOrNever = Annotated[int, Field(ge=0, le=1_000_000_000)]
Elements = Annotated[int, Field(ge=0, le=10**13)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0, le=1e6)]
NonNegative = Annotated[float, Field(ge=0.0, le=1e6)]


def _parse_string_list(value: Any) -> Any:
    """Convert a list or a comma-separated string to a list; `none`, [none] and null mean an empty list."""
    if value is None or value in ("none", ["none"], ("none",)):
        return []
    if isinstance(value, str):
        return [word.strip() for word in value.split(",") if word.strip()]
    if isinstance(value, list | tuple) and "" in value:
        raise ValueError("has an empty entry; remove it")
    return value


def is_pattern(name: str) -> bool:
    """Return whether `name` contains regex metacharacters, i.e. is a pattern rather than a layer name."""
    return re.search(r"[\\^$*+?{}\[\]|()]", name) is not None


def _parse_layer_names(value: Any) -> Any:
    """Split a setting into layer names and patterns, but not at commas within a pattern's brackets."""
    if not isinstance(value, str) or not is_pattern(value):
        return _parse_string_list(value)
    return [name.strip() for name in re.split(r",(?![^(\[{]*[)\]}])", value) if name.strip()]


def check_regex(text: str) -> str:
    """Return `text` if it is a valid regular expression. Raises ValueError otherwise."""
    try:
        re.compile(text)
    except re.error as error:
        fix = f"write .{text}" if text.startswith("*") else "fix it"
        raise ValueError(f"{text} is not a valid regular expression ({error}); {fix}") from None
    return text


def _check_patterns(names: Any) -> Any:
    for name in filter(is_pattern, names):
        check_regex(name)
    return names


def _wrap_in_list(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


def _parse_auto(value: Any) -> Any:
    if str(value) == str(AUTO):
        raise ValueError("below zero; write auto to let the memory estimate choose")
    return AUTO if isinstance(value, str) and value.strip().lower() == "auto" else value


def _format_auto(value: int) -> int | str:
    return "auto" if value == AUTO else value


# The JSON schema, used by editors, describes the accepted values, not the parsed ones.
_STRING_LIST_SCHEMA = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}, {"type": "null"}]}
_STAGE_SCHEMA = {"enum": ["auto", 0, 1, 2, 3]}
_BATCH_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 65_536}, {"const": "auto"}]}

StringList = Annotated[
    tuple[str, ...], Field(max_length=10_000), BeforeValidator(_parse_string_list), WithJsonSchema(_STRING_LIST_SCHEMA)
]
LayerNames = Annotated[
    tuple[str, ...],
    Field(max_length=10_000),
    BeforeValidator(_parse_layer_names),
    AfterValidator(_check_patterns),
    WithJsonSchema(_STRING_LIST_SCHEMA),
]
LayerRanks = Annotated[dict[str, Annotated[int, Field(ge=1, le=32_768)]], AfterValidator(_check_patterns)]
LayerAlphas = Annotated[dict[str, Positive], AfterValidator(_check_patterns)]
Texts = Annotated[tuple[str, ...], Field(max_length=1000), BeforeValidator(_wrap_in_list)]
ResumeChanges = Annotated[
    tuple[Literal["base_model", "adapter", "data", "seed", "batch", "precision", "optimizer", "scu"], ...],
    BeforeValidator(_parse_string_list),
    WithJsonSchema(_STRING_LIST_SCHEMA),
]
BatchSize = Annotated[
    Count | Literal[-1], BeforeValidator(_parse_auto), PlainSerializer(_format_auto), WithJsonSchema(_BATCH_SCHEMA)
]
Stage = Annotated[
    Literal[-1, 0, 1, 2, 3], BeforeValidator(_parse_auto), PlainSerializer(_format_auto), WithJsonSchema(_STAGE_SCHEMA)
]


class Section(BaseModel):
    """A frozen group of settings that rejects unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _parse_as_declared_type(cls, value: Any, info: ValidationInfo) -> Any:
        return parse_value(cls.model_fields[str(info.field_name)].annotation, value)
