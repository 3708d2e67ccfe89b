"""A job that another one of a higher priority pushes off its node, and signals before there is anything to save."""

from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT, STEPS, end_of, log_of, losses, wait_for
from tests.cluster.slurm_cluster import SlurmCluster
from trainer.checkpoint.checkpoint_files import whole_checkpoints

pytestmark = pytest.mark.slow
TWO_RANKS = ["--nodes=1", "--gpus-per-node=2", "--ntasks-per-node=2", "--cpus-per-task=1", "--time=30"]
MISCHIEF = Path(__file__).parent / "mischief"
SLOW = ["env", f"PYTHONPATH={MISCHIEF}:{ROOT}", "ZEROLORA_MISCHIEF=1:slow step:1"]


def submit(slurm: SlurmCluster, workplace: Path, name: str, *options: str) -> str:
    """A job of two ranks on one node, with steps slow enough to be preempted in; its number."""
    command = [*SLOW, "sbatch", "--parsable", *TWO_RANKS, *options, f"--output={workplace}/{name}.log"]
    command += ["slurm/train.sbatch", str(workplace / "config.yaml"), f"output_dir={workplace / name}"]
    return slurm.run(*command).strip()


def preempt(slurm: SlurmCluster) -> str:
    """Fill both nodes from the partition of high priority; the number of the job that does."""
    options = ["--partition=high", "--nodes=2", "--exclusive", "--time=5", "--output=/dev/null", "--wrap=sleep 3"]
    return slurm.run("sbatch", "--parsable", *options).strip()


def ends_where_the_whole_run_did(slurm: SlurmCluster, workplace: Path, name: str, job: str, expected: object) -> None:
    stopped_at = int(whole_checkpoints(workplace / name)[-1].name.rpartition("-")[2])
    assert 0 < stopped_at < STEPS
    slurm.start_now(job)
    assert end_of(slurm, job) == "COMPLETED", log_of(workplace, name)
    log = (workplace / f"{name}.log").read_text()
    assert "start 2, on" in log and f"at step {stopped_at}" in log, log
    assert slurm.restarts(job) == 1
    assert losses(workplace / name) == pytest.approx(expected, rel=1e-4)


def test_a_preempted_job_saves_and_goes_on(slurm: SlurmCluster, workplace: Path, reference: list[float]) -> None:
    """SLURM sends SIGTERM to the ranks and takes the node 90 s later, to queue the job again or to cancel it."""
    jobs = {
        "low": submit(slurm, workplace, "low", "--partition=low", "--nodelist=n1"),
        "low-cancel": submit(slurm, workplace, "low-cancel", "--partition=low-cancel", "--nodelist=n2"),
    }
    for name in jobs:
        wait_for(lambda name=name: losses(workplace / name), lambda name=name: log_of(workplace, name))
    high = preempt(slurm)
    for name, job in jobs.items():
        wait_for(
            lambda job=job: slurm.state(job) not in ("RUNNING", "COMPLETING"),
            lambda name=name: log_of(workplace, name),
        )
        shown = slurm.run("scontrol", "show", "job", job) + log_of(workplace, name)
        assert slurm.state(job) == "PENDING" and slurm.restarts(job) == 1, shown
        assert "== preempted, queued again" in (workplace / f"{name}.log").read_text()
    assert end_of(slurm, high) == "COMPLETED"
    for name, job in jobs.items():
        ends_where_the_whole_run_did(slurm, workplace, name, job, reference)
