"""A configuration in YAML, each setting below the reason for its value."""

import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.yaml_core import dump

WIDTH = 110


@dataclass(frozen=True)
class Line:
    """A setting, and why it is that."""

    name: str
    value: Any
    why: str


def as_yaml(lines: list[Line], output: Path, warnings: Sequence[str] = ()) -> str:
    """The file: each setting below its reason, sections in the order of their first setting."""
    text = [f"# zerolora train {shlex.quote(str(output))}", "# All other settings: zerolora config --schema"]
    for warning in warnings:
        text += textwrap.wrap(f"Warning: {warning}.", WIDTH, initial_indent="# ", subsequent_indent="# ")
    text.append("")
    sections = dict.fromkeys(line.name.rpartition(".")[0] for line in lines)
    for section in sections:
        indent = "  " if section else ""
        text += [f"{section}:"] if section else []
        for line in (line for line in lines if line.name.rpartition(".")[0] == section):
            mark = f"{indent}# "
            text += textwrap.wrap(line.why, WIDTH, initial_indent=mark, subsequent_indent=mark)
            text.append(indent + dump({line.name.rpartition(".")[2]: line.value}).rstrip("\n"))
    return "\n".join(text) + "\n"
