"""Compute nodes without the internet, as docs/guide/several-machines.md has it: download, prepare, a job offline."""

import subprocess
from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT, ZEROLORA, end_of, environment, log_of, losses
from tests.cluster.slurm_cluster import SlurmCluster
from tests.model_hub import MODEL, served_model

pytestmark = pytest.mark.nightly


def test_a_cache_filled_on_the_login_node_is_enough_for_the_job(
    slurm: SlurmCluster, workplace: Path, tmp_path: Path, six_steps: list[float]
) -> None:
    """The hosts of the cluster have no way to the hub: its address is one of this machine."""
    arguments = [str(workplace / "config.yaml"), f"base_model={MODEL}", "training.max_steps=6"]
    with served_model(workplace / "model", environment(), cache=tmp_path) as online:
        for command in (["download", MODEL], ["prepare", *arguments]):
            done = subprocess.run([*ZEROLORA, *command], env=online, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.rglob("model.safetensors"))
    offline = ["env", f"HF_HOME={tmp_path}", "HF_HUB_OFFLINE=1"]
    options = ["--nodes", "2", "--gpus-per-node", "1", "--cpus-per-task", "1", "--time", "30"]
    submit = [*ZEROLORA, "submit", *arguments, f"output_dir={workplace / 'offline'}", *options]
    job = slurm.run(*offline, *submit).split()[0]
    assert end_of(slurm, job) == "COMPLETED", log_of(workplace, "offline")
    assert losses(workplace / "offline") == pytest.approx(six_steps, rel=1e-4)
