"""Every place where code of ours runs instead of a library's, or answers a fault of one: the one list of them.

`zerolora doctor --patches` prints it with the installed versions; docs/reference/workarounds.md is written from it by
`python -m trainer.patches.register --markdown`. tests/unit/test_register.py looks through the tree for replacements
that are not listed. The entries are in trainer/patches/entries.py, in the order in which a run comes to them;
installation.py puts those of a model and its engine in place, and takes them back.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict

from trainer.contract.known_versions import KNOWN, installed
from trainer.patches.entries import PATCHES
from trainer.patches.patch import Patch

HEAD = """# What is replaced in the libraries, and why

Written by `python -m trainer.patches.register --markdown` from `trainer/patches/entries.py`, in the order in which a
run comes to them. `zerolora doctor --patches` prints the same with the installed versions.
"""


def version_line(patch: Patch) -> str:
    """`deepspeed 0.19.8, read in 0.19.8`; a version that was never tested is marked."""
    found = installed(patch.library)
    if found is None:
        return f"{patch.library} is not installed; read in {patch.read_in}"
    untested = "" if found in KNOWN[patch.library].tested else ", untested"
    return f"{patch.library} {found}{untested}; read in {patch.read_in}"


def text() -> Iterator[str]:
    """For the terminal."""
    for number, patch in enumerate(PATCHES, start=1):
        yield f"{number:2}. {patch.replaces}  [{version_line(patch)}]"
        for title, content in _details(patch):
            yield textwrap.fill(
                f"{title}: {content}", 116, initial_indent="      ", subsequent_indent="        ",
                break_on_hyphens=False, break_long_words=False,
            )  # fmt: skip


def markdown() -> str:
    """docs/reference/workarounds.md; without installed versions, which are those of one machine."""
    parts = [HEAD]
    for number, patch in enumerate(PATCHES, start=1):
        lines = [f"## {number}. {patch.replaces}", "", f"- library: {patch.library}, read in {patch.read_in}"]
        lines += [f"- {title}: {content}" for title, content in _details(patch)]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _details(patch: Patch) -> list[tuple[str, str]]:
    details = [
        ("why", patch.reason),
        ("active", patch.active),
        ("installed by", patch.installed_by),
        ("undone", patch.undone),
        ("upstream", patch.upstream),
    ]
    return [*details, ("test", patch.test)]


def main(argv: list[str] | None = None) -> int:
    """Print the list; exit code 0."""
    parser = argparse.ArgumentParser(prog="zerolora doctor --patches", description=str(__doc__).split("\n")[0])
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON array")
    form.add_argument("--markdown", action="store_true", help="the text of docs/reference/workarounds.md")
    options = parser.parse_args(argv)
    if options.json:
        print(json.dumps([asdict(patch) | {"installed": installed(patch.library)} for patch in PATCHES], indent=1))
    elif options.markdown:
        print(markdown(), end="")
    else:
        print("\n".join(text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
