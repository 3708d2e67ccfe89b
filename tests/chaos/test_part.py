"""A few minutes of tests/chaos: the whole of it is `python -m tests.chaos`."""

import json
import os
from pathlib import Path

import pytest

from tests.chaos.__main__ import PART, main

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_one_fault_of_each_kind_costs_steps_and_nothing_else(tmp_path: Path) -> None:
    """Started again by itself, but where it was told to stop; for a full disk a small one is mounted."""
    if os.geteuid() != 0:
        pytest.skip("needs root: a disk of its own is mounted, to be filled")
    assert main([str(tmp_path), "--part"]) == 0
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(record["fault"], record["phase"]) for record in records] == list(PART)
    ended = [record["fault"] for record in records if not record["by_itself"]]
    assert "SIGTERM" in ended and set(ended) <= {"SIGTERM", "disk full"}
