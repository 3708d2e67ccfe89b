"""Write docs/reference/workarounds.md, the list of all replacements of library code."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.config.yaml_core import read_yaml

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "workarounds.md"
HEAD = """# Replaced library code

Written by `python -m scripts.workarounds` from `trainer/patches/replacements.yaml`.
"""


@dataclass(frozen=True)
class Replacement:
    """An entry of replacements.yaml, which describes the fields."""

    replaces: str
    library: str
    read_in: str
    why: str
    active: str
    installed_by: str
    test: str
    upstream: str = "no issue known"


def collect() -> list[Replacement]:
    """Return the replacements by library, then by module."""
    libraries = read_yaml(ROOT / "trainer" / "patches" / "replacements.yaml").tree
    return [
        Replacement(what, library, rows["read_in"], **row)
        for library, rows in libraries.items()
        for what, row in rows.items()
        if what != "read_in"
    ]


def lines() -> Iterator[str]:
    """Yield the lines of the page."""
    for number, entry in enumerate(collect(), start=1):
        yield from (f"## {number}. {entry.replaces}", "", f"- library: {entry.library}, read in {entry.read_in}")
        for name in ("why", "active", "installed_by", "upstream", "test"):
            yield f"- {name.replace('_', ' ')}: {getattr(entry, name)}"
        yield ""


def markdown() -> str:
    """Return the text of docs/reference/workarounds.md."""
    return "\n".join([HEAD, *lines()])


if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
