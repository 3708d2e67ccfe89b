"""Print every replacement of library code, for `zerolora doctor --patches` and docs/reference/workarounds.md."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.config.yaml_core import read_yaml
from trainer.contract.known_versions import KNOWN, installed

HEAD = """# Replaced library code

Written by `python -m trainer.patches.register --markdown` from `trainer/patches/replacements.yaml`.
`zerolora doctor --patches` prints the same list with the installed versions.
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
    rows = read_yaml(Path(__file__).with_name("replacements.yaml")).tree
    return [Replacement(what, **row) for what, row in rows.items()]


def version_line(entry: Replacement) -> str:
    """Return `deepspeed 0.19.8; read in 0.19.8`; an installed version that was never tested is marked."""
    found = installed(entry.library)
    if found is None:
        return f"{entry.library} is not installed; read in {entry.read_in}"
    untested = "" if found in KNOWN[entry.library] else ", untested"
    return f"{entry.library} {found}{untested}; read in {entry.read_in}"


def lines(*, versions: bool) -> Iterator[str]:
    """Yield the lines of the document, or with `versions` those for the terminal: the installed versions as well."""
    for number, entry in enumerate(collect(), start=1):
        library = version_line(entry) if versions else f"{entry.library}, read in {entry.read_in}"
        yield from (f"## {number}. {entry.replaces}", "", f"- library: {library}")
        for name in ("why", "active", "installed_by", "upstream", "test"):
            yield f"- {name.replace('_', ' ')}: {getattr(entry, name)}"
        yield ""


def markdown() -> str:
    """Return the text of docs/reference/workarounds.md, without the installed versions."""
    return "\n".join([HEAD, *lines(versions=False)])


def main(argv: list[str] | None = None) -> int:
    """Print the list; exit code 0."""
    parser = argparse.ArgumentParser(prog="zerolora doctor --patches", description=str(__doc__).split("\n")[0])
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON array")
    form.add_argument("--markdown", action="store_true", help="print the text of docs/reference/workarounds.md")
    options = parser.parse_args(argv)
    if options.json:
        print(json.dumps([asdict(entry) | {"installed": installed(entry.library)} for entry in collect()], indent=1))
    elif options.markdown:
        print(markdown(), end="")
    else:
        print("\n".join(lines(versions=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
