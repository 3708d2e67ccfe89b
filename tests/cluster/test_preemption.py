"""A job that another one of a higher priority pushes off its node, and signals before there is anything to save."""

from functools import partial
from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT, STEPS, end_of, log_of, losses, wait_for
from tests.cluster.slurm_cluster import SlurmCluster
from trainer.checkpoint.checkpoint_files import list_checkpoints

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]
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


def was_queued_again(slurm: SlurmCluster, workplace: Path, name: str, job: str) -> int:
    """Wait until a preempted job waits for its next start; the step it has saved."""

    def shown() -> str:
        return slurm.run("scontrol", "show", "job", job) + log_of(workplace, name)

    # Not the first state that is another one: while SLURM is about to take the node there are some for a moment.
    wait_for(lambda: slurm.state(job) == "PENDING" and slurm.restarts(job) == 1, shown)
    stopped_at = int(list_checkpoints(workplace / name)[-1].name.rpartition("-")[2])
    assert 0 < stopped_at < STEPS and len(losses(workplace / name)) == stopped_at, shown()
    return stopped_at


def test_a_preempted_job_saves_and_resumes(slurm: SlurmCluster, workplace: Path, reference: list[float]) -> None:
    """SLURM sends SIGTERM to the ranks and takes the node 90 s later, to queue the job again or to cancel it."""
    jobs = {
        "low": submit(slurm, workplace, "low", "--partition=low", "--nodelist=n1"),
        "low-cancel": submit(slurm, workplace, "low-cancel", "--partition=low-cancel", "--nodelist=n2"),
    }
    for name in jobs:
        wait_for(partial(losses, workplace / name), partial(log_of, workplace, name))
    high = preempt(slurm)
    stopped_at = {name: was_queued_again(slurm, workplace, name, job) for name, job in jobs.items()}
    assert end_of(slurm, high) == "COMPLETED"
    for name, job in jobs.items():
        assert end_of(slurm, job) == "COMPLETED" and slurm.restarts(job) == 1, log_of(workplace, name)
        log = (workplace / f"{name}.log").read_text()
        assert "== preempted, queued again" in log and "start 2, on" in log, log
        assert "SIGUSR1" not in log, "the ranks got SIGTERM"
        assert f"at step {stopped_at[name]}" in log, log
        assert losses(workplace / name) == pytest.approx(reference, rel=1e-4)


def test_preemption_by_the_jobs_own_signal(slurm: SlurmCluster, workplace: Path, reference: list[float]) -> None:
    """SIGUSR1 to the script, as before the time limit, without SIGTERM, is reported as a preemption."""
    name = "user-signal"
    setting = "SlurmctldParameters=preempt_send_user_signal\n"  # since 23.02 PreemptParameters=send_user_signal
    slurm.reconfigure("PreemptMode=REQUEUE\nSlurmdTimeout", f"PreemptMode=REQUEUE\n{setting}SlurmdTimeout")
    try:
        job = submit(slurm, workplace, name, "--partition=low", "--nodelist=n1")
        wait_for(lambda: losses(workplace / name), lambda: log_of(workplace, name))
        high = preempt(slurm)
        stopped_at = was_queued_again(slurm, workplace, name, job)
        log = (workplace / f"{name}.log").read_text()
        assert "SIGUSR1: saving a checkpoint" in log and "== queued again" in log, log
        assert "SIGTERM" not in log and "== preempted" not in log, log
        assert end_of(slurm, high) == "COMPLETED"
        assert end_of(slurm, job) == "COMPLETED" and slurm.restarts(job) == 1, log_of(workplace, name)
        log = (workplace / f"{name}.log").read_text()
        assert "start 2, on" in log and f"at step {stopped_at}" in log, log
        assert losses(workplace / name) == pytest.approx(reference, rel=1e-4)
    finally:
        slurm.reconfigure(setting, "")


def test_the_time_is_up_while_the_environment_is_set_up(slurm: SlurmCluster, workplace: Path, tmp_path: Path) -> None:
    """A slow `module load`: the script hears SIGUSR1 all the same."""
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "env.sh").write_text(f"touch {tmp_path}/begun\nsleep 600\n")
    options = [*TWO_RANKS, f"--output={workplace}/slow-env.log", "slurm/train.sbatch", str(workplace / "config.yaml")]
    job = slurm.run("env", f"ZEROLORA_HOME={tmp_path}", "sbatch", "--parsable", *options).strip()
    wait_for((tmp_path / "begun").exists, lambda: log_of(workplace, "slow-env"))
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    wait_for(lambda: slurm.restarts(job) == 1, lambda: log_of(workplace, "slow-env"))
    slurm.run("scancel", job)
    assert "== queued again" in (workplace / "slow-env.log").read_text()
