"""docs/tutorials/slurm.md: its commands run as written on a cluster's login node."""

import re
from pathlib import Path

import pytest

from tests.cluster.conftest import end_of
from tests.cluster.slurm_cluster import SlurmCluster
from tests.tutorials import last_step, read_blocks

pytestmark = pytest.mark.slow


def test_the_commands_of_the_tutorial_work_in_order(slurm: SlurmCluster, tmp_path: Path) -> None:
    """After a block that submits a job, the reader waits for its end."""
    folder = tmp_path / "work"
    folder.mkdir()
    steps, shown = [], ""
    for block in read_blocks("slurm", tmp_path / "models"):
        done = slurm.hosts.run("login", ["bash", "-ec", block], env=slurm.environment(), cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        shown += done.stdout
        if "zerolora submit" in block and "--dry-run" not in block:
            (job,) = re.findall(r"^(\d+)\b", done.stdout, re.MULTILINE)
            log = folder / "runs" / "job" / "logs" / f"slurm-{job}.log"
            assert end_of(slurm, job) == "COMPLETED", log.read_text()
            steps.append(last_step(folder / "runs" / "job"))
    assert steps == [12, 16]
    assert "step     12 of 12" in shown and "base + adapter" in shown
