"""Eight minutes of tests/chaos: the whole of it is `python -m tests.chaos`."""

import json
from pathlib import Path

import pytest

from tests.chaos.__main__ import main, part

pytestmark = [pytest.mark.distributed, pytest.mark.nightly]
# Runs that are asked to stop, or need somebody's help to continue; the others must restart by themselves,
# once they have made a step.
MAY_END = {"SIGTERM", "SIGTERM twice at once", "disk full"}
BEFORE_A_STEP = {"begin", "tokenise", "load", "first step"}


def test_one_fault_of_each_kind_costs_steps_and_nothing_else(tmp_path: Path) -> None:
    """Each is reported with the right rank, and the adapter is that of the run without a fault."""
    assert main([str(tmp_path), "--part"]) == 0
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert sorted((record["fault"], record["phase"]) for record in records) == sorted(part())
    ended = {record["fault"] for record in records if not record["by_itself"] and record["phase"] not in BEFORE_A_STEP}
    assert "SIGTERM" in ended and ended <= MAY_END
