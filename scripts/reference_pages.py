"""Write docs/reference/settings.md and docs/reference/commands.md from the code; tests hold them to it.

python -m scripts.reference_pages      every command is asked for its --help: a minute, as each loads its libraries
"""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from typer.main import get_command

from launcher.commands import app
from trainer.config.settings_reference import reference_text

PAGES = Path(__file__).parents[1] / "docs" / "reference"


def settings_page() -> str:
    """Every setting with its type, bounds, default and meaning; a chapter for each section of the file."""
    lines = [
        "# Settings",
        "",
        "Written by `scripts/reference_pages.py`; `zerolora config --schema` prints the same.",
        "How files and `key=value` are read: [configuration](../guide/configuration.md).",
        "",
        "```text",
    ]
    for line in reference_text(110).splitlines():
        section = re.match(r"# ([\w.]+): (.*)", line)
        if section:
            while lines[-1] == "":
                lines.pop()
            lines += ["```", "", f"## {section[1]}", "", section[2], "", "```text"]
        else:
            lines.append(line)
    return "\n".join([*lines, "```", ""])


def command_names() -> list[str]:
    """The commands in the order in which `zerolora --help` shows them."""
    return list(get_command(app).commands)  # type: ignore[attr-defined]


def commands_page(helps: dict[str, str]) -> str:
    """What each command says of itself."""
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


def help_of(name: str) -> str:
    """The text of `zerolora NAME --help`, 100 columns wide."""
    environment = {**os.environ, "COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1", "DS_ACCELERATOR": "cpu"}
    words = [sys.executable, "-m", "launcher.cli", name, "--help"]
    return subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout


def helps() -> dict[str, str]:
    """The text of every command, two asked at a time."""
    names = command_names()
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(names, pool.map(help_of, names), strict=True))


def main() -> None:
    """Write both pages."""
    (PAGES / "settings.md").write_text(settings_page())
    (PAGES / "commands.md").write_text(commands_page(helps()))


if __name__ == "__main__":
    main()
