"""Print every replacement of library code, for `zerolora doctor --patches` and docs/reference/workarounds.md.

The entries are the `@replaces` decorators in trainer; `ops`, which must not import trainer, has its own below.
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from importlib import import_module
from pathlib import Path

from trainer.contract.known_versions import KNOWN, installed
from trainer.contract.replacements import REPLACEMENTS, Replacement, replaces
from trainer.parallel.ranks.lean_imports import import_lean

HEAD = """# Replaced library code

Written by `python -m trainer.patches.register --markdown` from the `@replaces` decorators in the source.
`zerolora doctor --patches` prints the same list with the installed versions.
"""
ROOT = Path(__file__).parents[2]
DECORATED = re.compile(r"^ *@replaces\($", re.MULTILINE)


def collect() -> list[Replacement]:
    """Import every module with a `@replaces`; return the replacements by library, then by module."""
    import_lean()
    for file in sorted((ROOT / "trainer").rglob("*.py")):
        if DECORATED.search(file.read_text(encoding="utf-8")):
            import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    _register_operators()
    return sorted(REPLACEMENTS, key=lambda entry: (entry.library, entry.installed_by))


@cache
def _register_operators() -> None:
    from ops.builder import LoraOpBuilder, register

    replaces(
        "the table of DeepSpeed's operators",
        library="deepspeed",
        read_in="0.19.8",
        why="DeepSpeed's op builder has no hook through which it would build and list our operators",
        active="`zerolora ops` and its report",
        test="tests/numerics/test_builder.py",
    )(register)
    replaces(
        "nvcc's flags",
        library="deepspeed",
        read_in="0.19.8",
        why="CUDAOpBuilder compiles with --use_fast_math, which would change results",
        active="building the CUDA operators",
        test="tests/unit/test_workarounds.py: test_deepspeeds_builder_asks_for_fast_math",
    )(LoraOpBuilder.nvcc_args)
    replaces(
        "torch's lock of extension builds",
        library="torch",
        read_in="2.13.0",
        why="a killed build leaves it behind, and every later build waits for it forever",
        active="building the CUDA operators, which takes a lock of ours first; `zerolora doctor` finds old locks",
        test="tests/unit/test_workarounds.py: test_torchs_build_lock_outlives_its_builder",
        upstream="https://github.com/pytorch/pytorch/issues/189245",
    )(LoraOpBuilder._compile)


def version_line(entry: Replacement) -> str:
    """Return `deepspeed 0.19.8; read in 0.19.8`; an installed version that was never tested is marked."""
    found = installed(entry.library)
    if found is None:
        return f"{entry.library} is not installed; read in {entry.read_in}"
    untested = "" if found in KNOWN[entry.library].tested else ", untested"
    return f"{entry.library} {found}{untested}; read in {entry.read_in}"


def text() -> Iterator[str]:
    """Yield the lines for the terminal."""
    for number, entry in enumerate(collect(), start=1):
        yield f"{number:2}. {entry.replaces}  [{version_line(entry)}]"
        for title, content in _details(entry):
            yield textwrap.fill(
                f"{title}: {content}", 116, initial_indent="      ", subsequent_indent="        ",
                break_on_hyphens=False, break_long_words=False,
            )  # fmt: skip


def markdown() -> str:
    """Return the text of docs/reference/workarounds.md, without the installed versions."""
    parts = [HEAD]
    for number, entry in enumerate(collect(), start=1):
        lines = [f"## {number}. {entry.replaces}", "", f"- library: {entry.library}, read in {entry.read_in}"]
        lines += [f"- {title}: {content}" for title, content in _details(entry)]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _details(entry: Replacement) -> list[tuple[str, str]]:
    return [
        ("why", entry.reason),
        ("active", entry.active),
        ("installed by", entry.installed_by),
        ("upstream", entry.upstream),
        ("test", entry.test),
    ]


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
        print("\n".join(text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
