"""What a value may be for the type of its setting: the rules that YAML and pydantic leave open.

Numbers are not truth values and truth values not numbers; text that is a number (`"2"`, `1_000`) is one where a number
is wanted; `None` and `none` mean nothing where a setting may be left out.
"""

import re
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from trainer.config.yaml_core import plain

_NOTHING = ("none", "null", "~")
_TRUE, _FALSE = ("true", "yes", "on", "y"), ("false", "no", "off", "n")
_GROUPED = re.compile(r"[-+]?[0-9]{1,3}(_[0-9]{3})+")


def kinds(annotation: Any) -> frozenset[Any]:
    """The types that a setting takes; Literal for one of several words, the type of its other alternatives as well."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kinds(arguments[0])
    if origin is Literal:
        return frozenset({Literal, *(type(value) for value in arguments if not isinstance(value, str))})
    if origin in (Union, UnionType):
        return frozenset().union(*map(kinds, arguments))
    return frozenset({origin or annotation})


def words(annotation: Any) -> frozenset[str]:
    """The words that a setting takes, which may be typed in capitals as well."""
    if annotation is Any:
        return frozenset()
    if get_origin(annotation) is Literal:
        return frozenset(value for value in get_args(annotation) if isinstance(value, str))
    return frozenset().union(*map(words, get_args(annotation)))


def is_text(annotation: Any) -> bool:
    """True for a setting that takes any text."""
    return str in kinds(annotation) <= {str, NoneType}


def may_be_nothing(annotation: Any, value: str) -> bool:
    """True if this text stands for a setting left out."""
    return NoneType in kinds(annotation) and value.strip().lower() in _NOTHING


def as_meant(annotation: Any, value: Any) -> Any:
    """The value for a setting of this type. Raises ValueError for one that only looks like it."""
    wanted = kinds(annotation)
    is_number = bool(wanted & {int, float})
    if not isinstance(value, dict) or dict in wanted:  # a section's own settings say it themselves
        _refuse_half_characters(value)
    if isinstance(value, bool):
        if is_number and bool not in wanted:
            raise ValueError(f"must be a {'whole ' * (float not in wanted)}number")
        return value
    if isinstance(value, str) and may_be_nothing(annotation, value):
        return None
    if isinstance(value, str) and Literal in wanted and (word := value.strip().lower()) in words(annotation):
        return value if value == "None" else word  # Python's None is no word
    if is_number and isinstance(value, str):
        number = plain(value.replace("_", "") if _GROUPED.fullmatch(value.strip()) else value)
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            return number
        if _python_reads_a_number(value):
            raise ValueError(f"must be a {'whole ' * (float not in wanted)}number, written as in 1000 or 1e3")
        return value
    if bool in wanted and value is not None:
        allowed = " or ".join(["must be true or false", *sorted(words(annotation))])
        word = str(value).strip().lower()
        if isinstance(value, (int, float)) and value in (0, 1):
            raise ValueError(f"{allowed}; write {str(value == 1).lower()}")
        if isinstance(value, str) and word in ("true", "false"):
            return word == "true"
        if isinstance(value, str) and word in _TRUE + _FALSE:
            raise ValueError(f"{allowed}, and this is text; write {str(word in _TRUE).lower()}")
        raise ValueError(allowed)
    return value


def _refuse_half_characters(value: Any) -> None:
    """ValueError for text with bytes that are not UTF-8, or with half of a character, which no file can hold later."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{value[error.start]!r} in it is no character; write it in UTF-8") from None
    elif isinstance(value, (list, tuple)):
        _refuse_half_characters("".join(inner for inner in value if isinstance(inner, str)))
    elif isinstance(value, dict):
        for inner in (*value, *value.values()):
            _refuse_half_characters(inner)


def _python_reads_a_number(text: str) -> bool:
    """True for `1_00`, `._1`, `infinity` and digits of other scripts, which pydantic would take."""
    try:
        float(text.replace("_", ""))
    except ValueError:
        return False
    return True
