"""Convert pydantic's errors to mistakes, with the setting's dotted name, its value and the allowed values."""

from collections.abc import Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trainer.config.aliases import ALIASES, REPLACEMENT_ADVICE
from trainer.config.errors import MISSING_DATA, Mistake, describe_problem, find_nearest, to_text
from trainer.config.sections import RunConfig
from trainer.config.training_sections import FRACTION_SETTINGS
from trainer.config.types import AUTO

_ALL_LISTED = "`zerolora config --schema` lists all of them"
_NUMBER_ERROR_TYPES = ("int_type", "int_parsing", "int_from_float", "float_type", "float_parsing", "finite_number")


def describe_errors(error: ValidationError) -> list[Mistake]:
    entries = sorted(error.errors(), key=lambda entry: entry["type"] != "extra_forbidden")
    alternatives: dict[tuple[str, ...], list[ErrorDetails]] = {}  # pydantic reports each alternative of a union
    for entry in entries:
        path = map(str, entry["loc"]) if entry["type"] == "extra_forbidden" else _follow_location(entry["loc"])[0]
        alternatives.setdefault(tuple(path), []).append(entry)
    return [_build_mistake(path, *errors) for path, errors in alternatives.items()]


def _build_mistake(path: Sequence[str], error: ErrorDetails, *others: ErrorDetails) -> Mistake:
    if error["type"] == "extra_forbidden":
        return _build_unknown_setting_mistake(path)
    name, value, section = ".".join(path), error["input"], find_section(path)
    if not path:
        return Mistake(ascii(to_text(value)), None, "unknown setting", _ALL_LISTED)
    if error["type"] == "missing" and path == ("dataset",):
        return MISSING_DATA
    if error["type"] == "missing":
        inner = f" with `{next(iter(section.model_fields))}: ...` nested under it" if section else ""
        return Mistake(name, None, "missing", f"it has no default; write `{path[-1]}: ...`{inner}")
    if value is None:
        return Mistake(name, None, "empty", "write a value, or remove the setting")
    if error["type"] == "tuple_type" and section:
        return Mistake(
            name, value, f"must be a list of sections, such as [{{{next(iter(section.model_fields))}: ...}}]"
        )
    if error["type"] == "string_type" and isinstance(value, (list, dict)):
        fix = "use dataset.mix for several sources" if name == "dataset.path" else "write one value, or quote it"
        return Mistake(name, value, f"must be a string, not a {'list' if isinstance(value, list) else 'mapping'}", fix)
    if name == "adapters" and error["type"] == "tuple_type":
        return Mistake(name, value, "must be a list of mappings, such as [{name: a}, {name: b}]")
    if error["type"] in ("model_type", "model_attributes_type") and section:
        return build_section_mistake(name, section, value)
    problem, above = describe_problem(error), find_section(path[:-1])
    if value == -1 and above and above.model_fields[path[-1]].default is None:  # "no limit" in other trainers
        return Mistake(name, value, problem, "remove it")
    if value is True and above and (meaning := above.model_fields[path[-1]].description):
        problem += f" ({meaning.split('. ')[0].removesuffix('.')})"  # a switch in other trainers, but a number here
    allowed = next((other["ctx"]["expected"] for other in others if other["type"] == "literal_error"), None)
    if allowed and error["type"] in _NUMBER_ERROR_TYPES:
        problem += f", or {'auto' if allowed == str(AUTO) else allowed}"
    if path[-1] in FRACTION_SETTINGS and isinstance(value, float) and value > 1.0:
        problem += ", or below 1 as a fraction of the run"
    return Mistake(name, value, problem)


def build_section_mistake(name: str, section: type[BaseModel], value: Any) -> Mistake:
    """Return the mistake for a section that was set to a single value."""
    first = next(iter(section.model_fields))
    return Mistake(name, value, "must be a section", f"write `{name}.{first}=...`, or nest `{first}:` under it")


def _build_unknown_setting_mistake(path: Sequence[str]) -> Mistake:
    """Return the mistake for an unknown name, with the nearest name in its section or, failing that, in any section."""
    dotted, name = ".".join(path), path[-1]
    settings = {setting: setting for setting in list_setting_names()} | ALIASES
    candidates = {key: setting for known, setting in settings.items() for key in (known, known.rsplit(".", 1)[-1])}
    section, above = find_section(path[:-1]), ".".join(path[:-1])
    section_aliases = {
        key.rpartition(".")[2]: ALIASES[key] for key in ALIASES if above and key.rpartition(".")[0] == above
    }
    if name.startswith("\u00a0"):
        return Mistake(dotted, None, "indented with no-break spaces", "indent with spaces")
    if name in REPLACEMENT_ADVICE and section and name not in candidates:
        return Mistake(dotted, None, "not a zerolora setting", REPLACEMENT_ADVICE[name])
    if name in ALIASES or name in RunConfig.model_fields:
        suggestion = ALIASES.get(name, name)
    elif section and (close := find_nearest(name.partition("[")[0], [*section.model_fields, *section_aliases])):
        suggestion = section_aliases.get(close, ".".join([*path[:-1], close]))
    elif section and (inner := next((field for field in section.model_fields if name.endswith(f"_{field}")), "")):
        suggestion = ".".join([*path[:-1], inner])
    else:
        suggestion = candidates.get(find_nearest(name, candidates, 0.9) or "", "")
    fix = f"did you mean {suggestion}{', the whole list' * ('[' in name)}?" if suggestion else _ALL_LISTED
    return Mistake(dotted or "''", None, "unknown setting", fix, suggestion)


def suggest_override(option: str) -> str | None:
    """Return how to write a setting that was typed as an option, such as `--training.epochs`; None for other names."""
    name = option.partition("=")[0].lstrip("-").replace("-", "_")
    inner = [setting for setting in list_setting_names() if setting.endswith(f".{name}")]
    names = [name] if name in {*list_setting_names(), *ALIASES} else inner
    return f"settings are written without dashes: {names[0]}=VALUE" if len(names) == 1 else None


def list_setting_names(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    names: list[str] = []
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            names += list_setting_names(inner, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def find_section(path: Sequence[str]) -> type[BaseModel] | None:
    return _follow_location(path)[1]


def _follow_location(location: Sequence[str | int]) -> tuple[list[str], type[BaseModel] | None]:
    """Return the parts of a pydantic location that the user wrote, and the section at that location or None.

    The remaining parts name alternatives of a union, not fields, list indices or mapping keys.
    """
    section: type[BaseModel] | None = RunConfig
    path: list[str] = []
    is_map = False
    for part in location:
        if section is not None and part in section.model_fields:
            path.append(str(part))
            kind = section.model_fields[str(part)].annotation
            section, is_map = _find_model(kind), get_origin(kind) is dict
        elif part != "[key]" and (is_map or isinstance(part, int) or part.isdigit()):
            path.append(str(part))
    return path, section


def get_setting_type(dotted: str) -> Any:
    """Return the type of a setting; None if the setting does not exist or accepts any value."""
    above, _, name = dotted.rpartition(".")
    if section := find_section(above.split(".") if above else []):
        return section.model_fields[name].annotation if name in section.model_fields else None
    kind = get_setting_type(above)
    return get_args(kind)[1] if get_origin(kind) is dict and get_args(kind)[1] is not Any else None


def _find_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for inner in get_args(annotation) if (model := _find_model(inner))), None)
