"""Generate the settings reference from the settings' classes: text for users and a JSON schema for editors."""

import re
import textwrap
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainer.config.aliases import ALIASES
from trainer.config.errors import to_text
from trainer.config.needs import list_needs
from trainer.config.sections import RunConfig
from trainer.config.types import AUTO

NAMES = {str: "string", int: "integer", float: "number", bool: "true | false", NoneType: "none", Any: "anything"}


def format_reference(width: int = 100) -> str:
    return "\n".join(_format_section(RunConfig, "", max(60, min(width, 120))))


def build_json_schema() -> dict[str, Any]:
    """Return the JSON schema for configuration files, in which output_dir is optional."""
    schema = RunConfig.model_json_schema()
    schema["required"] = [name for name in schema["required"] if name != "output_dir"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _format_section(section: type[BaseModel], prefix: str, width: int) -> list[str]:
    lines: list[str] = []
    inner: list[tuple[str, type[BaseModel]]] = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            inner.append((name, field.annotation))
        else:
            switches = (need for need in list_needs(section, name, prefix) if need.switch != "task")
            needs = " and ".join(need.format_condition() for need in switches if not need.requires_unset_switch)
            lines += _format_setting(prefix + name, field, width, f" Needs {needs}." if needs else "")
    for name, model in inner:
        text = " ".join((model.__doc__ or "").split())
        lines += ["", f"# {name}: {text}", *_format_section(model, f"{prefix}{name}.", width)]
    return lines


def _format_setting(name: str, field: FieldInfo, width: int, needs: str) -> list[str]:
    default = "required" if field.is_required() else f"default {to_text(field.get_default(call_default_factory=True))}"
    head = f"{name}: {_format_type(field.annotation, field.metadata)} ({default})"
    aliases = [alias for alias, setting in ALIASES.items() if setting == name and "." not in alias]
    text = " ".join((field.description or "").split())
    also = f" Also read: {', '.join(aliases)}." if aliases else ""
    return [
        *textwrap.wrap(head, width, subsequent_indent="  ", break_on_hyphens=False),
        *textwrap.wrap(
            text + needs + also, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
        ),
    ]


def _format_type(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _format_type(arguments[0], arguments[1:])
    if origin is Literal:
        return " | ".join("auto" if value == AUTO else to_text(value) for value in arguments)
    if origin in (Union, UnionType):
        return " | ".join(_format_type(argument) for argument in arguments)
    if origin is tuple:
        return f"list of {_format_type(arguments[0])}"
    if origin is dict:
        return f"mapping of {_format_type(arguments[0])} to {_format_type(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return re.sub(r"Section$", "", annotation.__name__).lower() + " section"
    return NAMES[annotation] + _format_range(metadata)


def _format_range(metadata: list[Any] | tuple[Any, ...]) -> str:
    # In a union, the bounds of Annotated[..., Field(ge=0)] are nested one level deeper.
    flat = [inner for outer in metadata for inner in (outer.metadata if isinstance(outer, FieldInfo) else [outer])]
    signs = {Ge: ("ge", ">="), Gt: ("gt", ">"), Le: ("le", "<="), Lt: ("lt", "<")}
    known = [(bound, *signs[type(bound)]) for bound in flat if type(bound) in signs]
    bounds = [f"{sign} {getattr(bound, name)}" for bound, name, sign in known]
    return f" {', '.join(bounds)}" if bounds else ""
