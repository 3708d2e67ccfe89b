"""Measure the peak of a shape with capped logits, which no fused loss supports, and eager attention."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import ROOT

pytestmark = pytest.mark.gpu

SHAPE = "gemma2-2b,num_hidden_layers=4"
LENGTH, ROWS = 1024, 2
WITHIN = 0.07


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """bf16 and NF4, with and without recomputation, at two stages; a few steps each in one process."""
    folder: Path = tmp_path_factory.mktemp("capped")
    sizes = ["--length", str(LENGTH), "--batch-size", str(ROWS)]
    command = [sys.executable, "-m", "tests.gpu.memory_table", "--shape", SHAPE, *sizes]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "0"}
    env.pop("DS_ACCELERATOR", None)
    done = subprocess.run(
        [*command, "--json", str(folder / "rows.json")], env=env, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (folder / "rows.json").exists(), done.stdout[-3000:] + done.stderr[-3000:]
    print(done.stdout)
    found: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text())
    return found


def test_every_case_needs_what_was_estimated(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 8
    wrong = {
        "-".join(str(row[name]) for name in ("adapter", "recompute", "stage")): row["predicted"] / row["measured"]
        for row in rows
        if row["predicted"] / row["measured"] != pytest.approx(1.0, abs=WITHIN)
    }
    assert not wrong, rows


def test_the_logits_are_most_of_it(rows: list[dict[str, Any]]) -> None:
    """Otherwise the test would say little of them: 2,048 targets x 256,000 logits."""
    logits = 14 * ROWS * LENGTH * 256_000
    assert all(row["measured"] > logits for row in rows)
