"""Jobs on a real SLURM cluster of two nodes: trained, preempted, out of time, with a lost node."""

import json
import re
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import (
    COMMAND,
    PATIENCE_S,
    ROOT,
    STEPS,
    ZEROLORA,
    end_of,
    environment,
    kill_rank,
    log_of,
    losses,
    wait_for,
)
from tests.cluster.slurm_cluster import SlurmCluster
from tests.foreign_files import write_foreign_files
from tests.tiny import write_chats
from trainer.checkpoint.checkpoint_files import list_checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SIZE = ["--nodes=2", "--gpus-per-node=1", "--ntasks-per-node=1", "--cpus-per-task=1", "--time=30"]
SALLOC = ["salloc", "--nodes=2", "--gpus-per-node=1", "--ntasks-per-node=1"]
MISCHIEF = Path(__file__).parent / "mischief"


def batch(slurm: SlurmCluster, workplace: Path, name: str, *settings: str, options: list[str] | None = None) -> str:
    """Submit slurm/train.sbatch by hand; the job's number."""
    command = ["sbatch", "--parsable", *SIZE, *(options or []), f"--output={workplace}/{name}.log"]
    command += ["slurm/train.sbatch", str(workplace / "config.yaml"), f"output_dir={workplace / name}", *settings]
    return slurm.run(*command).strip()


@pytest.mark.nightly
def test_a_script_by_hand_trains_on_two_nodes(slurm: SlurmCluster, workplace: Path, reference: list[float]) -> None:
    job = batch(slurm, workplace, "zero2", "zero.stage=2")
    assert end_of(slurm, job) == "COMPLETED", log_of(workplace, "zero2")
    assert losses(workplace / "zero2") == pytest.approx(reference, rel=1e-4)
    log = (workplace / "zero2.log").read_text()
    assert "world        2 ranks on n1, n2: cpu" in log
    assert json.loads((workplace / "zero2" / "run.json").read_text())["world_size"] == 2


def test_submit_trains_under_zero_3_and_status_reports_it(
    slurm: SlurmCluster, workplace: Path, reference: list[float]
) -> None:
    run = workplace / "zero3"
    arguments = [str(workplace / "config.yaml"), f"output_dir={run}", "zero.stage=3"]
    options = ["--nodes", "2", "--gpus-per-node", "1", "--time", "30", "--partition", "all", "--cpus-per-task", "1"]
    options += ["--account", "team", "--job-name", "third", "--sbatch=--mem=0", "--sbatch=--exclusive"]
    printed = slurm.run(*ZEROLORA, "submit", *arguments, *options)
    job, log = printed.split()
    assert log == f"{run}/logs/slurm-{job}.log"
    assert (slurm.field(job, "Account"), slurm.field(job, "JobName")) == ("team", "third")
    after = slurm.run(*ZEROLORA, "submit", *arguments, *options, "--dependency", f"afterok:{job}").split()[0]
    assert slurm.field(after, "Dependency").startswith(f"afterok:{job}")
    slurm.run("scancel", after)
    shown = slurm.run(*ZEROLORA, "status", job)
    assert f"job      {job} " in shown and f"run      {run}" in shown
    assert end_of(slurm, job) == "COMPLETED", log_of(workplace, "zero3")
    assert losses(run) == pytest.approx(reference, rel=1e-4)
    assert Path(log).stat().st_size > 0
    for target in (job, str(run)):
        shown = slurm.run(*ZEROLORA, "status", target)
        for expected in (f"job      {job} COMPLETED", "state    done", f"step     {STEPS} of {STEPS}", "loss", "tok/s"):
            assert expected in shown, shown


def test_scancel_ends_a_job_for_good_and_the_ranks_save(slurm: SlurmCluster, workplace: Path) -> None:
    """SIGTERM to all of the job, and KillWait for what they do then."""
    run = workplace / "cancelled"
    job = batch(slurm, workplace, "cancelled", "training.max_steps=100000", "training.save_steps=0")
    wait_for(lambda: losses(run), lambda: log_of(workplace, "cancelled"))
    slurm.run("scancel", job)
    assert end_of(slurm, job) == "CANCELLED" and slurm.restarts(job) == 0
    shown = slurm.run(*ZEROLORA, "status", job)
    assert f"job      {job} CANCELLED" in shown and "running" not in shown, shown
    wait_for(
        lambda: "stopped and saved at step" in log_of(workplace, "cancelled"), lambda: log_of(workplace, "cancelled")
    )
    assert int(list_checkpoints(run)[-1].name.rpartition("-")[2]) == len(losses(run))


@pytest.mark.nightly
def test_a_lost_node_is_named_and_the_job_queued_again(
    slurm: SlurmCluster, workplace: Path, reference: list[float]
) -> None:
    run = workplace / "lost"
    job = batch(slurm, workplace, "lost")
    wait_for(lambda: list_checkpoints(run) if run.exists() else None, lambda: log_of(workplace, "lost"))
    slurm.kill_processes("n2")
    try:
        wait_for(lambda: slurm.restarts(job) == 1, lambda: log_of(workplace, "lost"))
        named = re.compile(r"^(lost nodes: n2;|the run failed: rank 1 on n2 )", re.M)
        wait_for(lambda: named.search((workplace / "lost.log").read_text()), lambda: log_of(workplace, "lost"))
    finally:
        slurm.switch_on("n2")
    wait_for(lambda: slurm.state(job) == "PENDING", lambda: slurm.run("scontrol", "show", "job", job))
    slurm.hold(job, 80)  # a minute after the node's return slurmctld ends there what had this job's number
    assert end_of(slurm, job) == "COMPLETED", log_of(workplace, "lost")
    assert "resumed from" in (workplace / "lost.log").read_text()
    assert losses(run) == pytest.approx(reference, rel=1e-4)


@pytest.mark.nightly
def test_a_lost_node_is_excluded_if_the_job_survives(
    slurm: SlurmCluster, workplace: Path, reference: list[float]
) -> None:
    """`salloc --no-kill` with `training.elastic`: the other node takes both parts of the global batch.

    Such a job is never queued again, whatever its Requeue says: there are restarts without being asked for.
    """
    run = workplace / "elastic"
    command = [*SALLOC, "--no-kill", *ZEROLORA, "train", str(workplace / "config.yaml"), f"output_dir={run}"]
    process = slurm.hosts.start(
        "login", [*command, "training.elastic=true", "training.max_restarts=null"], env=slurm.environment(), cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_for(lambda: process.poll() is not None or (run.exists() and list_checkpoints(run)), lambda: "no checkpoint")
    slurm.switch_off("n2")
    try:
        out, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        slurm.switch_on("n2")
        slurm.wait_for_nodes()
    assert process.returncode == 0, out
    assert "continuing with 1 of 2 ranks" in out and "restart 1 of 3: resuming from checkpoint-" in out, out
    assert losses(run) == pytest.approx(reference, abs=1e-5)


@pytest.mark.nightly
def test_a_job_is_requeued_after_a_node_lost_its_power(slurm: SlurmCluster, workplace: Path) -> None:
    """A node without power closes no connection: only SLURM reports it, after SlurmdTimeout (300 s by default)."""
    slurm.reconfigure("SlurmdTimeout=15", "SlurmdTimeout=80")
    try:
        job = batch(slurm, workplace, "dark", "training.max_steps=100000")
        wait_for(lambda: losses(workplace / "dark"), lambda: log_of(workplace, "dark"))
        slurm.switch_off("n2")
        try:
            wait_for(lambda: slurm.restarts(job) == 1, lambda: log_of(workplace, "dark"))
            # Another test covers the restart. While the job leaves its nodes, requeueing would undo a scancel.
            wait_for(lambda: slurm.state(job) == "PENDING", lambda: slurm.run("scontrol", "show", "job", job))
            slurm.run("scancel", job)
            assert end_of(slurm, job) == "CANCELLED", slurm.run("scontrol", "show", "job", job)
        finally:
            slurm.switch_on("n2")
    finally:
        slurm.reconfigure("SlurmdTimeout=80", "SlurmdTimeout=15")


@pytest.mark.nightly
def test_a_job_that_lost_its_first_node_waits_for_the_old_lock_and_resumes_elsewhere(
    slurm: SlurmCluster, workplace: Path, reference: list[float]
) -> None:
    """Nothing is left to release the folder; the other node detects the dead holder after 120 s of silence."""
    run, log = workplace / "moved", workplace / "moved.log"
    job = batch(slurm, workplace, "moved", options=["--nodes=1", "--gpus-per-node=2", "--ntasks-per-node=2"])
    wait_for(lambda: list_checkpoints(run) if run.exists() else None, lambda: log_of(workplace, "moved"))
    lost = slurm.field(job, "BatchHost")
    slurm.switch_off(lost)
    try:
        wait_for(lambda: slurm.restarts(job) == 1, lambda: log_of(workplace, "moved"))
        wait_for(lambda: slurm.state(job) == "PENDING", lambda: slurm.run("scontrol", "show", "job", job))
        wait_for(lambda: slurm.state(job) == "RUNNING", lambda: slurm.run("scontrol", "show", "job", job))
        other = slurm.field(job, "BatchHost")
        held = re.compile(rf"locked by process \d+ on {lost} of job {job}, since .*; waiting for a heartbeat, 120 s")
        wait_for(lambda: held.search(log.read_text()), lambda: log_of(workplace, "moved"))
        wait_for(lambda: "was killed; taking over its lock" in log.read_text(), lambda: log_of(workplace, "moved"))
        assert end_of(slurm, job) == "COMPLETED" and other != lost, log_of(workplace, "moved")
    finally:
        slurm.switch_on(lost)
        slurm.wait_for_nodes()
    assert f"start 2, on {other}" in log.read_text() and "resumed from" in log.read_text()
    assert losses(run) == pytest.approx(reference, rel=1e-4)


@pytest.mark.nightly
def test_a_job_that_reaches_its_limit_ends_where_the_whole_run_did(
    slurm: SlurmCluster, workplace: Path, reference: list[float]
) -> None:
    """slurmctld itself sends SIGUSR1, 60 to 90 seconds after the start; the steps are slow enough to last longer."""
    run = workplace / "limit"
    arguments = [str(workplace / "config.yaml"), f"output_dir={run}"]
    options = ["--nodes", "2", "--gpus-per-node", "1", "--cpus-per-task", "1", "--time", "2", "--grace", "30"]
    slow = ["env", f"PYTHONPATH={MISCHIEF}:{ROOT}", "ZEROLORA_MISCHIEF=1:slow step:1"]
    job = slurm.run(*slow, *ZEROLORA, "submit", *arguments, *options).split()[0]
    # On a machine that is busy with others the time may be up before there is anything to save.
    wait_for(
        lambda: slurm.state(job) in ("PENDING", "COMPLETED") and run.exists() and list_checkpoints(run),
        lambda: log_of(workplace, "limit"),
        every_s=0.5,
    )
    stopped_at = int(list_checkpoints(run)[-1].name.rpartition("-")[2])
    assert 0 < stopped_at < STEPS and len(losses(run)) == stopped_at
    assert "stopped and saved at step" in (run / "logs" / "console.log").read_text()
    assert end_of(slurm, job) == "COMPLETED", log_of(workplace, "limit")
    log = (run / "logs" / f"slurm-{job}.log").read_text()
    assert log.count("== queued again") == slurm.restarts(job), log
    assert f"start {1 + slurm.restarts(job)}, on n[1-2]" in log and f"at step {stopped_at}" in log
    assert losses(run) == pytest.approx(reference, rel=1e-4)


def test_srun_alone_trains_in_a_shell_of_salloc(slurm: SlurmCluster, workplace: Path, six_steps: list[float]) -> None:
    """`zerolora train` in such a shell is below, with a stream."""
    config = workplace / "config.yaml"
    command = f"srun -n 2 python -m trainer.train {config} output_dir={workplace / 'srun'} training.max_steps=6"
    slurm.run(*SALLOC, "bash", "-c", command, timeout=600)
    assert losses(workplace / "srun") == pytest.approx(six_steps, rel=1e-4)


@pytest.mark.nightly
def test_the_ranks_of_two_nodes_tokenise_a_stream_for_each_other(
    slurm: SlurmCluster, workplace: Path, tmp_path: Path
) -> None:
    """The working directory has files named like our modules, which srun's ranks must not import."""
    write_chats(tmp_path / "many.jsonl", 1300)
    mark = write_foreign_files(tmp_path)
    settings = [f"dataset.path={tmp_path}/many.jsonl", "dataset.streaming=true"]
    command = [COMMAND, "train", str(workplace / "config.yaml"), *settings]
    alone = [*command, f"output_dir={tmp_path / 'alone'}"]
    subprocess.run(alone, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, check=True)
    run = tmp_path / "two"
    with (tmp_path / "log").open("w") as log:
        command = [*SALLOC, *command, f"output_dir={run}"]
        process = slurm.hosts.start("login", command, env=slurm.environment(), cwd=tmp_path, stdout=log, stderr=log)
    assert process.wait(timeout=PATIENCE_S) == 0, (tmp_path / "log").read_text()
    assert losses(run) == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)
    assert not mark.exists()


@pytest.mark.nightly
def test_a_rank_killed_on_another_node_is_137(slurm: SlurmCluster, workplace: Path) -> None:
    """The other rank is halted, so that only srun has seen the end of the one."""
    run = workplace / "srun-killed"
    command = [*SALLOC, *ZEROLORA, "train", str(workplace / "config.yaml"), f"output_dir={run}"]
    process = slurm.hosts.start(
        "login", [*command, "training.max_steps=100000"], env=slurm.environment(), cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_for(lambda: losses(run) or process.poll() is not None, lambda: "no step")
    kill_rank(slurm.hosts, "n2", other="n1")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 137, out
    assert "the run failed: rank 1 on n2 was killed by signal 9 (SIGKILL) (" in out


@pytest.mark.nightly
def test_a_rank_does_not_outlive_its_slurmstepd(slurm: SlurmCluster, workplace: Path) -> None:
    run = workplace / "orphan"
    job = batch(slurm, workplace, "orphan", "training.max_steps=100000", "training.save_steps=0")
    wait_for(lambda: losses(run), lambda: log_of(workplace, "orphan"))
    ranks = [found for found in slurm.hosts.processes("n2") if "trainer.train" in found.cmdline()]
    assert ranks
    slurm.kill_processes("n2", "slurmstepd")
    _, alive = psutil.wait_procs(ranks, timeout=PATIENCE_S)
    slurm.run("scancel", job, check=False)
    assert alive == [], log_of(workplace, "orphan")
    end_of(slurm, job)
    slurm.wait_for_nodes()


def test_more_ranks_than_were_started_is_refused_on_every_node(slurm: SlurmCluster, workplace: Path) -> None:
    """Two tasks that each think they are alone, as when srun's variables are lost."""
    alone = ["env", "-u", "SLURM_PROCID", *ZEROLORA[:1], "-m", "trainer.train"]
    command = [
        "srun",
        "--nodes=2",
        "--ntasks=2",
        "--mpi=none",
        *alone,
        str(workplace / "config.yaml"),
        "--world-size=2",
    ]
    done = slurm.hosts.run("login", command, env=slurm.environment(), cwd=ROOT)
    assert done.returncode == 2
    for node in ("n1", "n2"):
        assert f"2 ranks were requested, but the environment on {node} sets rank 0 of 1" in done.stderr


def test_other_code_on_one_node_stops_the_run(slurm: SlurmCluster, workplace: Path, tmp_path: Path) -> None:
    """The second rank runs a copy of the checkout in which one line is added."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for package in ("trainer", "ops", "launcher"):
        subprocess.run(["cp", "-r", str(ROOT / package), str(copy / package)], check=True)
    with (copy / "trainer" / "run.py").open("a") as file:
        file.write("# other\n")
    program = f'cd "$([ "$SLURM_PROCID" = 1 ] && echo {copy} || echo {ROOT})" && PYTHONPATH=$PWD exec "$@"'
    command = ["srun", "--nodes=2", "--ntasks=2", "--mpi=none", "bash", "-c", program, "bash", *ZEROLORA[:1], "-m"]
    command += ["trainer.train", str(workplace / "config.yaml"), f"output_dir={tmp_path / 'run'}"]
    done = slurm.hosts.run("login", command, env=slurm.environment(), cwd=ROOT)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "code differs: " in done.stdout and " on n1; " in done.stdout and " on n2; " in done.stdout
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.nightly
def test_a_folder_that_the_nodes_do_not_share_is_noticed_before_a_weight_is_loaded(
    slurm: SlurmCluster, workplace: Path
) -> None:
    """On n2 a disk of its own is mounted where the run's folder is."""
    run = workplace / "unshared"
    run.mkdir()
    program = f'[ "$SLURM_PROCID" = 0 ] || mount -t tmpfs tmpfs {run}; exec "$@"'
    own = ["srun", "--nodes=2", "--ntasks=2", "--mpi=none", "unshare", "--mount", "bash", "-c", program, "bash"]
    command = [*own, *ZEROLORA[:1], "-m", "trainer.train", str(workplace / "config.yaml"), f"output_dir={run}"]
    done = slurm.hosts.run("login", command, env=slurm.environment(), cwd=ROOT)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"output_dir={run}: files that rank 0 on n1 writes there are not visible on n2; use a folder" in done.stdout
    assert not (run / "metrics.jsonl").exists()
