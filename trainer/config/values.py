"""Convert values to the types of their settings; YAML and pydantic alone are too strict or too lenient.

Numbers and booleans are not converted to each other; text such as `"2"` or `1_000` is a number for numeric settings;
`None` and `none` are null for optional settings.
"""

import re
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from trainer.config.yaml_core import parse_scalar

_NULL = ("none", "null", "~")
_TRUE, _FALSE = ("true", "yes", "on", "y"), ("false", "no", "off", "n")
_GROUPED = re.compile(r"[-+]?[0-9]{1,3}(_[0-9]{3})+")


def list_accepted_types(annotation: Any) -> frozenset[Any]:
    """Return the types that a setting accepts. String choices appear as `Literal`, other choices as their type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return list_accepted_types(arguments[0])
    if origin is Literal:
        return frozenset({Literal, *(type(value) for value in arguments if not isinstance(value, str))})
    if origin in (Union, UnionType):
        return frozenset().union(*map(list_accepted_types, arguments))
    return frozenset({origin or annotation})


def list_choices(annotation: Any) -> frozenset[str]:
    """Return the string choices of a setting, which are case-insensitive."""
    if annotation is Any:
        return frozenset()
    if get_origin(annotation) is Literal:
        return frozenset(value for value in get_args(annotation) if isinstance(value, str))
    return frozenset().union(*map(list_choices, get_args(annotation)))


def is_text(annotation: Any) -> bool:
    return str in list_accepted_types(annotation) <= {str, NoneType}


def is_null(annotation: Any, value: str) -> bool:
    return NoneType in list_accepted_types(annotation) and value.strip().lower() in _NULL


def parse_value(annotation: Any, value: Any) -> Any:
    """Convert a value to its setting's type. Raises ValueError for values such as a boolean written as `yes` or 1."""
    types = list_accepted_types(annotation)
    is_number = bool(types & {int, float})
    if isinstance(value, bool):
        if is_number and bool not in types:
            raise ValueError(f"must be a {'whole ' * (float not in types)}number")
        return value
    if isinstance(value, str) and is_null(annotation, value):
        return None
    if isinstance(value, str) and Literal in types and (word := value.strip().lower()) in list_choices(annotation):
        return value if value == "None" else word  # Python's None is not the choice `none`
    if is_number and isinstance(value, str):
        number = parse_scalar(value.replace("_", "") if _GROUPED.fullmatch(value.strip()) else value)
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            return number
        if _is_python_number(value):
            raise ValueError(f"must be a {'whole ' * (float not in types)}number, such as 1000 or 1e3")
        if bool not in types:
            return value
    if bool in types and value is not None and not (is_number and isinstance(value, (int, float))):
        *others, last = ["true", "false", *sorted(list_choices(annotation)), *["a number"] * is_number]
        allowed = f"must be {', '.join(others)} or {last}"
        word = str(value).strip().lower()
        if isinstance(value, (int, float)) and value in (0, 1):
            raise ValueError(f"{allowed}; write {str(value == 1).lower()}")
        if isinstance(value, str) and word in ("true", "false"):
            return word == "true"
        if isinstance(value, str) and word in _TRUE + _FALSE:
            raise ValueError(f"{allowed}, not a string; write {str(word in _TRUE).lower()}")
        raise ValueError(allowed)
    return value


def set_dotted(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a value by dotted name. Create missing sections, and replace values that are in their place."""
    *sections, last = dotted.split(".")
    for section in sections:
        if not isinstance(tree.get(section), dict):
            tree[section] = {}
        tree = tree[section]
    tree[last] = value


def _is_python_number(text: str) -> bool:
    """Return whether pydantic would accept `text` as a number, such as `1_00`, `infinity` or non-ASCII digits."""
    try:
        float(text.replace("_", ""))
    except ValueError:
        return False
    return True
