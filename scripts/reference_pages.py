"""Write docs/reference/settings.md and docs/reference/commands.md from the code; tests check that they match.

python -m scripts.reference_pages
"""

import io
import os
import re
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from unittest.mock import patch

import launcher.commands
from launcher.commands import MODULES, build_command
from launcher.module import run_main
from trainer.config.settings_reference import format_reference

PAGES = Path(__file__).parents[1] / "docs" / "reference"


def settings_page() -> str:
    """Return a page with the type, bounds, default and meaning of every setting, one chapter per section."""
    lines = [
        "# Settings",
        "",
        "Written by `scripts/reference_pages.py`; `zerolora config --schema` prints the same.",
        "How files and `key=value` are read: [configuration](../guide/configuration.md).",
        "",
        "```text",
    ]
    for line in format_reference(110).splitlines():
        section = re.match(r"# ([\w.]+): (.*)", line)
        if section:
            while lines[-1] == "":
                lines.pop()
            lines += ["```", "", f"## {section[1]}", "", section[2], "", "```text"]
        else:
            lines.append(line)
    return "\n".join([*lines, "```", ""])


def command_names() -> list[str]:
    """Return the commands in the order of `zerolora --help`."""
    return list(build_command().commands)


def commands_page(helps: dict[str, str]) -> str:
    """Return a page with the help text of each command."""
    lines = [
        "# Commands",
        "",
        "What `zerolora COMMAND --help` prints; written by `scripts/reference_pages.py`.",
    ]
    for name, text in helps.items():
        lines += [
            "",
            f"## zerolora {name}",
            "",
            "```text",
            *[line.rstrip() for line in text.strip().splitlines()],
            "```",
        ]
    return "\n".join([*lines, ""])


def helps() -> dict[str, str]:
    """Return the output of `zerolora NAME --help` for every command, 100 columns wide, run in this process."""
    plain = {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1", "DS_ACCELERATOR": "cpu"}
    with patch.dict(os.environ, plain):
        return {name: _capture_help(name) for name in command_names()}


def _capture_help(name: str) -> str:
    text = io.StringIO()
    arguments = [MODULES[name][0]] if name in MODULES else ["zerolora", name]
    with patch.object(sys, "argv", [*arguments, "--help"]), redirect_stdout(text), suppress(SystemExit):
        if name in MODULES:
            run_main(MODULES[name][0])
        else:
            launcher.commands.main()
    return text.getvalue()


def main() -> None:
    """Write both pages."""
    (PAGES / "settings.md").write_text(settings_page())
    (PAGES / "commands.md").write_text(commands_page(helps()))


if __name__ == "__main__":
    main()
