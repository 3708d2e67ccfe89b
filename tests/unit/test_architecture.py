"""docs/architecture.md: its picture follows the layers contract, and whatever it points at is there."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()


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


def test_no_word_is_explained_twice() -> None:
    words = re.findall(r"^\| ([^|]+) \|", TEXT.split("## Our own words")[1], re.MULTILINE)[1:]
    assert words == sorted(words, key=str.lower) and len(words) == len(set(words)) and len(words) >= 20
