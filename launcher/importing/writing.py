"""A translation as a commented YAML file: behind each setting where it comes from, above all what is different."""

import textwrap
from typing import Any

from pydantic import BaseModel

from launcher.importing.translation import Remark, Translation
from trainer.config import RunConfig
from trainer.config.yaml_core import dump

WIDTH = 118
COLUMN = 56


def as_yaml(translation: Translation, name: str) -> str:
    """The text of a configuration file; `name` is what it will be called."""
    theirs = translation.theirs
    lines = [f"# zerolora train {name}", "#", f"# Imported from {theirs.path}, written for {theirs.trainer}."]
    lines += _remarks("Not as it was there:", translation.different)
    lines += _remarks("Not offered here, and left out:", translation.left_out)
    if translation.no_effect:
        names = ", ".join(sorted(dict.fromkeys(translation.no_effect)))
        lines += ["#", *_wrapped("# ", f"Without effect here: {names}.", "#   ")]
    lines += ["", *_section(translation, RunConfig, "", "")]
    return "\n".join(lines) + "\n"


def _remarks(head: str, remarks: list[Remark]) -> list[str]:
    if not remarks:
        return []
    lines = ["#", f"# {head}"]
    for remark in dict.fromkeys(remarks):
        lines += _wrapped("#   ", f"{remark.where}: {remark.text}", "#     ")
    return lines


def _wrapped(first: str, text: str, other: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=other, break_on_hyphens=False, break_long_words=False
    )


def _section(translation: Translation, section: type[BaseModel], prefix: str, indent: str) -> list[str]:
    """The settings in the order of the reference; sections last, each with what it has."""
    lines: list[str] = []
    inner: list[str] = []
    for name, field in section.model_fields.items():
        dotted = f"{prefix}{name}"
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            below = _section(translation, kind, f"{dotted}.", f"{indent}  ")
            inner += [f"{indent}{name}:", *below] if below else []
        elif (setting := translation.settings.get(dotted)) is not None:
            lines += _entry(name, setting.value, setting.origin, indent)
    return lines + inner


def _entry(name: str, value: Any, origin: str, indent: str) -> list[str]:
    first, *rest = _value_lines(name, value, indent)
    return [f"{first:<{COLUMN}}  # {origin}", *rest]


def _value_lines(name: str, value: Any, indent: str) -> list[str]:
    if isinstance(value, str) and "\n" in value and _is_plain(value):
        chomped = value.removesuffix("\n")
        mark = "|" if value.endswith("\n") else "|-"
        return [f"{indent}{name}: {mark}", *(f"{indent}  {line}".rstrip() for line in chomped.split("\n"))]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        lines = [f"{indent}{name}:"]
        for item in value:
            entry = [line for key, inner in item.items() for line in _value_lines(key, inner, f"{indent}    ")]
            lines += [f"{indent}  - {entry[0].strip()}", *entry[1:]]
        return lines
    if isinstance(value, dict) and any(
        isinstance(inner, (dict, list)) or "\n" in str(inner) for inner in value.values()
    ):
        return [f"{indent}{name}:", *(
            line for key, inner in value.items() for line in _value_lines(key, inner, f"{indent}  ")
        )]  # fmt: skip
    return [f"{indent}{name}: {_flow(value)}"]


def _is_plain(text: str) -> bool:
    """Whether a block scalar gives the text back as it is."""
    body = text.removesuffix("\n")
    bad = body.endswith("\n") or body.startswith((" ", "\n")) or any(line != line.rstrip() for line in body.split("\n"))
    return not bad and body.isprintable() is False and all(line.isprintable() for line in body.split("\n"))


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flow(key)}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_flow(inner) for inner in value) + "]"
    if isinstance(value, str) and ("\n" in value or len(value) > 60 or any(mark in value for mark in "{}[],")):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t") + '"'
    return dump([value]).removeprefix("- ").rstrip("\n")
