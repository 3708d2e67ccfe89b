"""Convert pydantic's errors to messages with the setting's dotted name, its value and the allowed values."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trainer.config.aliases import ALIASES, ELSEWHERE
from trainer.config.errors import DATA_WANTED, nearest, shown
from trainer.config.sections import RunConfig
from trainer.config.types import AUTO

# pydantic's messages are for programmers; these are for users, for the types of error that a YAML file can cause.
WORDS = {
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be {ge} or more",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be {le} or less",
    "literal_error": "must be {expected}",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number, such as 0.0001 or 1e-4",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text; put it in quotes",
    "tuple_type": "must be a list, such as [a, b]",
    "dict_type": "must be a map, such as {{a: b}}",
    "too_long": "{actual_length} entries; must have {max_length} or fewer",
    "string_too_long": "must have {max_length} characters or fewer",
    "int_parsing_size": "must be a whole number of fewer digits",
}


def describe_errors(error: ValidationError, written_as: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return name and error message of each mistake, unknown settings first; `written_as` has the names as typed."""
    found: dict[str, str] = {}
    for entry in sorted(error.errors(), key=lambda entry: entry["type"] != "extra_forbidden"):
        if entry["type"] == "extra_forbidden":
            path = [str(part) for part in entry["loc"]]
            found.setdefault(".".join(path), unknown_setting_message(path))
            continue
        # pydantic reports each alternative of a union; only the first is used.
        path, section = _follow(entry["loc"])
        dotted = ".".join(path)
        line = found.setdefault(dotted, _format_mistake(entry, path, section, written_as.get(dotted, dotted)))
        other = entry.get("ctx", {}).get("expected")
        if entry["type"] == "literal_error" and line.endswith(("number", "1e-4")):
            found[dotted] = f"{line}, or {'auto' if other == str(AUTO) else other}"
    return list(found.items())


def _format_mistake(found: ErrorDetails, path: list[str], section: type[BaseModel] | None, name: str) -> str:
    if not path:
        return f"{shown(found['input'])!a}: unknown setting; `zerolora config --schema` lists all of them"
    if found["type"] == "missing" and path == ["dataset"]:
        return DATA_WANTED
    if found["type"] == "missing":
        inner = f" with `{next(iter(section.model_fields))}: ...` below it" if section else ""
        return f"{name}: missing; it has no default, write `{path[-1]}: ...`{inner}"
    if found["input"] is None:
        return f"{name}: empty; write a value, or remove it"
    if found["type"] == "tuple_type" and section:
        first = next(iter(section.model_fields))
        return f"{name}={shown(found['input'])}: must be a list of sections, such as [{{{first}: ...}}]"
    if found["type"] == "string_type" and isinstance(found["input"], (list, dict)):
        fix = "use dataset.mix for several sources" if name == "dataset.path" else "put it in quotes"
        kind = "list" if isinstance(found["input"], list) else "map"
        return f"{name}={shown(found['input'])}: must be text, not a {kind}; {fix}"
    if found["type"] in ("model_type", "model_attributes_type") and section:
        return section_wanted_message(name, section, found["input"])
    above = section_at(path[:-1])
    meaning = above.model_fields[path[-1]].description if found["input"] is True and above else None
    hint = f" ({meaning.split('.')[0]})" if meaning else ""  # a switch in other trainers, but a number here
    return f"{name}={shown(found['input'])}: {describe_problem(found)}{hint}"


def section_wanted_message(name: str, section: type[BaseModel], value: Any) -> str:
    """Return the error message for a section that was given a single value."""
    first = next(iter(section.model_fields))
    return f"{name}={shown(value)}: must be a section; write `{name}.{first}=...` or `{first}:` below it"


def unknown_setting_message(path: Sequence[str]) -> str:
    """Return the error message for an unknown name, with the nearest setting of its section or else of all."""
    dotted, name = ".".join(path), path[-1]
    if dotted in ELSEWHERE:
        return f"{dotted}: not a setting here; {ELSEWHERE[dotted]}"
    if name in ALIASES:
        return f"{dotted}: unknown setting; did you mean {ALIASES[name]}?"
    if (section := section_at(path[:-1])) and (close := nearest(name, section.model_fields)):
        return f"{dotted}: unknown setting; did you mean {'.'.join([*path[:-1], close])}?"
    everywhere = {key: setting for setting in setting_names() for key in (setting, setting.rsplit(".", 1)[-1])} | {
        key: ours for alias, ours in ALIASES.items() for key in (alias, alias.rsplit(".", 1)[-1])
    }
    close = nearest(dotted, everywhere, 0.8) or nearest(name, everywhere, 0.8)
    fix = f"did you mean {everywhere[close]}?" if close else "`zerolora config --schema` lists all of them"
    return f"{dotted}: unknown setting; {fix}"


def suggest_override(option: str, words: Sequence[str]) -> str | None:
    """Return the override to write for a setting typed as an option: `training.epochs=3` for `--training.epochs 3`."""
    name = option.partition("=")[0].lstrip("-")
    known = {*setting_names(), *ALIASES}
    name = next((known_name for known_name in (name, name.replace("-", "_")) if known_name in known), "")
    if not name:
        return None
    for at, word in enumerate(words):
        if word.partition("=")[0] == option.partition("=")[0]:
            following = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("--") else "..."
            return f"{name}={word.partition('=')[2] or following}"
    return f"{name}=..."


def setting_names(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """Return the dotted names of all settings, in order."""
    names: list[str] = []
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            names += setting_names(inner, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def section_at(path: Sequence[str]) -> type[BaseModel] | None:
    """Return the model at a dotted path, through lists and optional sections, or None."""
    return _follow(path)[1]


def _follow(location: Sequence[str | int]) -> tuple[list[str], type[BaseModel] | None]:
    """Return the parts of a location that the user wrote, and the section there, if any.

    pydantic adds the alternatives of a union, which are neither fields nor positions nor keys of a map.
    """
    section: type[BaseModel] | None = RunConfig
    path: list[str] = []
    is_map = False
    for part in location:
        if section is not None and part in section.model_fields:
            path.append(str(part))
            kind = section.model_fields[str(part)].annotation
            section, is_map = _find_model(kind), get_origin(kind) is dict
        elif is_map or isinstance(part, int) or part.isdigit():
            path.append(str(part))
    return path, section


def setting_type(dotted: str) -> Any:
    """Return the type of a setting; None if it does not exist or accepts anything."""
    section: type[BaseModel] | None = RunConfig
    kind: Any = None
    for part in dotted.split("."):
        if section is not None:
            if part not in section.model_fields:
                return None
            kind = section.model_fields[part].annotation
            section = _find_model(kind)
        elif get_origin(kind) is dict and get_args(kind)[1] is not Any:
            kind = get_args(kind)[1]
        else:
            return None
    return kind


def _find_model(annotation: Any) -> type[BaseModel] | None:
    """Return the section in a field's type, also within a tuple or an optional type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for inner in get_args(annotation) if (model := _find_model(inner))), None)


def describe_problem(found: ErrorDetails) -> str:
    """Describe the values that a setting accepts, given pydantic's error."""
    words = WORDS.get(found["type"])
    if words:
        bounds = {name: _whole(value) for name, value in found.get("ctx", {}).items()}
        return words.format(**bounds).replace(f"be {AUTO}, ", "be auto, ")
    message = found["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value
