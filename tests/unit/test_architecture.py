"""docs/architecture.md: its picture follows the layers contract, and whatever it points at is there."""

import re
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()


# Files of one name in several rooms, each of which is the same thing there.
SAME_THING = {
    "axolotl.py": "what concerns Axolotl",
    "batches.py": "micro-batches of a kind of model",
    "checks.py": "checks of what the room is about",
    "command.py": "the subcommand of the room",
    "eight_bit.py": "frozen weights in 8 bits: operators, layers",
    "plots.py": "curves drawn by matplotlib",
    "preflight.py": "what is checked before a weight is loaded",
    "report.py": "what the room's command writes",
    "scu_train.py": "the flags of the published scripts: launcher, rank",
    "task.py": "what is asked of a kind of model, and one that does it",
}


def _exists(name: str, folders: list[Path]) -> bool:
    return any((folder / name).exists() for folder in [ROOT, ROOT / "trainer", *folders])


def test_the_picture_has_the_layers_of_the_contract_in_their_order() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    picture = TEXT.split("\ntrainer/ ")[1].split("\nops/ ")[0]
    drawn = re.findall(r"^    (\w+(?: \| \w+)*)  ", picture, re.MULTILINE)
    assert drawn == layers


def test_every_file_that_it_names_is_there() -> None:
    """A bare name lies in the folder of a path named on the same line."""
    anywhere = [ROOT / "launcher" / "supervision", ROOT / "trainer" / "commands" / "doctor"]
    found, missing = 0, []
    for line in TEXT.splitlines():
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
    assert len([line for line in table.splitlines() if line.startswith("|")]) - 2 >= 25


def test_no_file_name_means_two_things() -> None:
    files = [path for room in ("launcher", "trainer", "ops") for path in (ROOT / room).rglob("*.py")]
    names = Counter(path.name for path in files if not path.name.startswith("__"))
    assert {name for name, rooms in names.items() if rooms > 1} == set(SAME_THING)


def test_no_file_is_too_long_to_read() -> None:
    sources = [path for room in ("launcher", "trainer", "ops") for path in (ROOT / room).rglob("*.py")]
    assert {str(path.relative_to(ROOT)) for path in sources if path.read_text().count("\n") > 350} == set()


def test_no_word_is_explained_twice() -> None:
    words = re.findall(r"^\| ([^|]+) \|", TEXT.split("## Our own words")[1], re.MULTILINE)[1:]
    assert words == sorted(words, key=str.lower) and len(words) == len(set(words)) and len(words) >= 20
