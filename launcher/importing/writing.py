"""Write a translation as a YAML file, with remarks at the top and the origin of each setting as a comment."""

import math
import textwrap
from typing import Any

from pydantic import BaseModel

from launcher.importing.translation import Foreign, Setting, Translation
from trainer.config import RunConfig
from trainer.config.yaml_core import dump

WIDTH = 118
COLUMN = 56


def format_yaml(translation: Translation, name: str) -> str:
    """Return the text of a configuration file with the given name."""
    foreign = translation.foreign
    lines = ["#", *_wrap_comment("# ", f"Imported from {foreign.label}, written for {foreign.trainer}.", "#   ")]
    lines += _format_remarks(foreign, "Differences:", translation.different)
    lines += _format_remarks(foreign, "Not supported, and left out:", translation.left_out)
    if translation.no_effect:
        names = ", ".join(sorted(dict.fromkeys(translation.no_effect)))
        lines += ["#", *_wrap_comment("# ", f"Without effect here: {names}.", "#   ")]
    lines += ["", *_format_section(translation, RunConfig, "", "")]
    return "\n".join([f"# zerolora train {_printable(name)}", *lines]) + "\n"


def _format_remarks(foreign: Foreign, head: str, remarks: list[tuple[str, str]]) -> list[str]:
    lines = ["#", f"# {head}"] if remarks else []
    for name, text in dict.fromkeys(remarks):
        lines += _wrap_comment("#   ", f"{_describe_origin(foreign, (name,))}: {text}", "#     ")
    return lines


def _describe_origin(foreign: Foreign, names: tuple[str, ...]) -> str:
    """Return `line 12, sequence_len`."""
    line = foreign.line(names[0])
    return f"line {line}, {', '.join(names)}" if line else ", ".join(names)


def _wrap_comment(first: str, text: str, other: str) -> list[str]:
    return textwrap.wrap(
        _printable(text), WIDTH, initial_indent=first, subsequent_indent=other, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


def _printable(text: str) -> str:
    """Escape characters that could end a comment; names of files and keys may contain any."""
    return "".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in text)


def _format_section(translation: Translation, section: type[BaseModel], prefix: str, indent: str) -> list[str]:
    """Return the settings in the order of the reference, sections last."""
    lines: list[str] = []
    inner: list[str] = []
    for name, field in section.model_fields.items():
        dotted = f"{prefix}{name}"
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            below = _format_section(translation, kind, f"{dotted}.", f"{indent}  ")
            inner += [f"{indent}{name}:", *below] if below else []
        elif (setting := translation.settings.get(dotted)) is not None:
            lines += _format_entry(translation.foreign, name, setting, indent)
    return lines + inner


def _format_entry(foreign: Foreign, name: str, setting: Setting, indent: str) -> list[str]:
    first, *rest = _format_value(name, setting.value, indent)
    origin = _describe_origin(foreign, setting.names) if setting.names else f"the default of {foreign.trainer}"
    return [f"{first:<{COLUMN}}  # {_printable(origin)}", *rest]


def _format_value(name: str, value: Any, indent: str) -> list[str]:
    name = _format_inline(name)
    if isinstance(value, str) and "\n" in value and _is_plain(value):
        mark = "|" if value.endswith("\n") else "|-"
        lines = value.removesuffix("\n").split("\n")
        return [f"{indent}{name}: {mark}", *(f"{indent}  {line}".rstrip() for line in lines)]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        lines = [f"{indent}{name}:"]
        for item in value:
            entry = [line for key, inner in item.items() for line in _format_value(key, inner, f"{indent}    ")]
            first, *others = entry or ["{}"]  # empty after a mistake, which is reported later
            lines += [f"{indent}  - {first.strip()}", *others]
        return lines
    if isinstance(value, dict) and any(
        isinstance(inner, (dict, list)) or "\n" in str(inner) for inner in value.values()
    ):
        below = (_format_value(key, inner, f"{indent}  ") for key, inner in value.items())
        return [f"{indent}{name}:", *(line for lines in below for line in lines)]
    return [f"{indent}{name}: {_format_inline(value)}"]


def _is_plain(text: str) -> bool:
    """Return whether a block scalar preserves the text."""
    lines = text.removesuffix("\n").split("\n")
    is_even = bool(lines[0].strip() and lines[-1]) and not text.startswith(" ")
    return is_even and all(line == line.rstrip() and line.isprintable() for line in lines)


def _format_inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_format_inline(key)}: {_format_inline(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_format_inline(inner) for inner in value) + "]"
    is_quoted = isinstance(value, str) and (not value.isprintable() or any(mark in value for mark in "{}[],"))
    text = dump(value, default_style='"' if is_quoted else None, width=math.inf)
    return text.removesuffix("\n...\n").strip("\n")
