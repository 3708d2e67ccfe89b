"""docs/tutorials: the commands of each page run as written, in order, in an empty folder."""

import subprocess
from pathlib import Path

import pytest

from tests.cluster.conftest import environment
from tests.tutorials import TUTORIALS, last_step, read_blocks

PATIENCE_S = 900

# What each page must leave behind: the run's folder, its steps, and the files of the last command.
RESULTS = {
    "first-run": ("runs/my", 20, "merged/model.safetensors"),
    "your-data": ("runs/faq", 24, "runs/faq/report.html"),
    "several-gpus": ("runs/two", 12, "compared.html"),
    "qlora": ("runs/qlora", 6, "merged/model.safetensors"),
    "moe": ("runs/moe", 6, "runs/moe/adapter_model.safetensors"),
    "images": ("runs/style", 10, "runs/style/export-kohya/lora.safetensors"),
}
CLUSTER = {"slurm"}
"""Tutorials of tests/cluster/test_tutorial.py."""


def test_every_tutorial_is_run() -> None:
    assert {page.stem for page in TUTORIALS.glob("*.md")} == set(RESULTS) | CLUSTER


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize("name", RESULTS)
def test_commands_of_a_tutorial_work_in_order(name: str, tmp_path: Path) -> None:
    script = "".join(["set -ex\n", *read_blocks(name, tmp_path / "models")])
    folder = tmp_path / "work"
    folder.mkdir()
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    run, steps, file = RESULTS[name]
    assert last_step(folder / run) == steps
    assert (folder / file).stat().st_size > 0
