"""The page "What breaks elsewhere": its tests exist, its peers' results are the measured ones."""

import ast
import json
import re

import pytest

from tests.bench.peer_cases import CASES as PEER_CASES
from tests.bench.peer_faults import CASES, COMPLAINTS, DATA, LIMITS, MARKS, OURS, PAGE, ROOT, table

SECTIONS = re.split(r"^### ", PAGE.read_text(), flags=re.MULTILINE)[1:]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_there_are_twenty_in_order() -> None:
    assert [int(section.partition(".")[0]) for section in SECTIONS] == list(range(1, 21))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.partition("\n")[0])
def test_a_complaint_has_threads_and_tests_that_exist(section: str) -> None:
    parts = [section.find(f"**{name}:**") for name in ("Complaint", "zerolora", "Tests")]
    assert -1 < parts[0] < parts[1] < parts[2]
    assert re.search(r"\]\(https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+\)", section[: parts[1]])
    tests = NAMED.findall(section[parts[2] :])
    assert tests and len(tests) == section[parts[2] :].count("::")
    for file, name in tests:
        functions = {
            node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, f"{file} has no {name}"


def test_the_table_is_that_of_the_measurements() -> None:
    shown = PAGE.read_text().split(MARKS[0])[1].split(MARKS[1])[0].strip()
    assert shown == table(json.loads(DATA.read_text())), (
        "python -c 'import tests.bench.peer_faults as p; p.write_page()'"
    )


def test_every_case_is_known_on_both_sides() -> None:
    assert CASES.keys() == COMPLAINTS.keys() == PEER_CASES.keys() and OURS.keys() <= CASES.keys()


def test_what_fails_in_a_peer_holds_here() -> None:
    found = json.loads(DATA.read_text())
    failing = [name for name, case in found.items() if not case["peer"]["ok"]]
    assert len(failing) > len(LIMITS)
    assert [name for name in failing if not (found[name]["zerolora"] or {}).get("ok")] == [*LIMITS]
