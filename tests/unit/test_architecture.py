"""docs/architecture.md and extending.md: the diagram follows the layers contract, and what they name exists."""

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

from trainer.config import UserError
from trainer.contract.exit_codes import EXIT_USAGE

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
EXTENDING = (ROOT / "docs" / "extending.md").read_text()
PACKAGES = {"launcher", "trainer", "ops", "benchmarks", "examples"}


LONGEST_FUNCTION = 60
# Files of one name in several rooms, each of which is the same thing there.
SAME_THING = {
    "adapters.py": "adapters: the subcommand of the launcher, the export",
    "axolotl.py": "what concerns Axolotl",
    "batches.py": "micro-batches of a kind of model",
    "checks.py": "checks of what the room is about",
    "command.py": "the subcommand of the room",
    "files.py": "files that a room reads or writes",
    "many_adapters.py": "several adapters in a run: operators, layers",
    "eight_bit.py": "frozen weights in 8 bits: operators, layers",
    "preflight.py": "what is checked before a weight is loaded",
    "report.py": "what the room's command writes",
    "scu_train.py": "the flags of the published scripts: launcher, rank",
    "task.py": "what is asked of a kind of model, and one that does it",
}


# Files with imports of our own within functions, by what these wait for.
LATE = {
    "bitsandbytes, which PEFT's layers bring: seconds, and a notice on a CPU": "trainer/tasks/images/model.py "
    "trainer/memory/observed.py trainer/model/adapter.py trainer/model/base.py trainer/model/expert_forward.py "
    "trainer/model/saved_adapter.py trainer/patches/installation.py",
    "torch and transformers, where a mistake in the arguments is reported without them": "trainer/commands/validate.py "
    "examples/demo.py trainer/commands/doctor/probe.py benchmarks/tiers/machine.py",
    "the operators, registered where they are used": "trainer/setup/preflight.py trainer/memory/preflight.py",
    "DeepSpeed's op builder, and Triton, which torch's CPU builds lack": "ops/backend.py ops/head.py",
    "packages of others that may not be installed": "benchmarks/bench/peers.py",
    "another environment, in which not all of zerolora can be imported": "benchmarks/bench/assignment.py",
    "the settings of signals and the allocator, which come first": "trainer/train.py trainer/scu_train.py",
}


def _exists(name: str, folders: list[Path]) -> bool:
    return any((folder / name).exists() for folder in [ROOT, ROOT / "trainer", *folders])


def test_the_picture_has_the_layers_of_the_contract_in_their_order() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    picture = TEXT.split("subgraph trainer")[1].split("subgraph ops")[0]
    assert re.findall(r'\["(\w+(?: \| \w+)*)<br/>', picture) == layers
    arrows = re.findall(r"^        (\w+) --> (\w+)\[", picture, re.MULTILINE)
    assert len(arrows) == len(layers) - 1 and [above for above, _ in arrows[1:]] == [below for _, below in arrows[:-1]]


def test_every_file_that_it_names_is_there() -> None:
    """A bare name lies in the folder of a path named on the same line."""
    anywhere = [ROOT / "launcher" / "supervision", ROOT / "trainer" / "commands" / "doctor"]
    found, missing = 0, []
    for line in [*TEXT.splitlines(), *EXTENDING.splitlines()]:
        names = re.findall(r"`([\w./]+(?:\.py|\.cu|\.h|/))`", line)
        folders = [ROOT / name if name.endswith("/") else (ROOT / name).parent for name in names]
        missing += [name for name in names if not _exists(name, folders + anywhere)]
        found += len(names)
    assert found > 80 and missing == []


def test_every_file_of_the_flow_of_a_step_is_there() -> None:
    flow = TEXT.split("## One step")[1].split("## One run")[0]
    names = re.findall(r"[\w/]+\.py", flow)
    assert len(names) > 10 and [name for name in names if not _exists(name, [])] == []


def test_a_newcomer_has_where_to_look() -> None:
    table = TEXT.split("## Where to change what")[1].split("## ")[0]
    assert 25 <= len([line for line in table.splitlines() if line.startswith("|")]) - 2 <= 40


def test_a_new_task_finds_all_that_it_must_provide() -> None:
    tree = ast.parse((ROOT / "trainer" / "tasks" / "task.py").read_text())
    (task,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Task"]
    methods = {node.name for node in task.body if isinstance(node, ast.FunctionDef)}
    section = EXTENDING.split("## What a task must provide")[1].split("## ")[0]
    assert len(methods) > 10 and methods <= set(re.findall(r"`(\w+)`", section))


def test_no_file_name_means_two_things() -> None:
    files = [path for room in PACKAGES for path in (ROOT / room).rglob("*.py")]
    names = Counter(path.name for path in files if not path.name.startswith("__"))
    assert {name for name, rooms in names.items() if rooms > 1} == set(SAME_THING)


def test_exit_codes_are_written_once() -> None:
    files = [path for room in PACKAGES for path in (ROOT / room).rglob("*.py")]
    assert [path.name for path in files if re.search(r"^EXIT_\w+.* = \d", path.read_text(), re.M)] == ["exit_codes.py"]
    assert UserError.exit_code == EXIT_USAGE


def test_no_function_is_too_long_to_read() -> None:
    sources = [path for room in PACKAGES for path in (ROOT / room).rglob("*.py")]
    functions = [
        (f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1)
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [name for name, length in functions if length > LONGEST_FUNCTION] == []


def test_what_is_imported_late_has_a_reason() -> None:
    """No import within a function hides one that the layers do not allow: each saves time, or waits for something."""
    found = set()
    for path in (path for room in PACKAGES - {"launcher"} for path in (ROOT / room).rglob("*.py")):
        functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
        inside = [node for function in functions for node in ast.walk(function)]
        names = [node.module for node in inside if isinstance(node, ast.ImportFrom)]
        names += [each.name for node in inside if isinstance(node, ast.Import) for each in node.names]
        if any(str(name).partition(".")[0] in ("trainer", "ops") for name in names):
            found.add(str(path.relative_to(ROOT)))
    assert found == {name for names in LATE.values() for name in names.split()}


def test_no_word_is_explained_twice() -> None:
    words = re.findall(r"^\| ([^|]+) \|", EXTENDING.split("## Glossary")[1], re.MULTILINE)[1:]
    assert words == sorted(words, key=str.lower) and len(words) == len(set(words)) and len(words) >= 20


def test_every_decision_says_what_it_costs_and_what_would_change_it() -> None:
    records = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    parts = ("Question", "Chosen", "Cost", "Would change it")
    assert len(records) >= 10
    assert [path.name for path in records if not all(f"**{part}.**" in path.read_text() for part in parts)] == []
