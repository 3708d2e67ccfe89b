"""Two hosts with an sshd each, reached through a hostfile by DeepSpeed's launcher over pdsh."""

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.cluster.conftest import COMMAND, ROOT, ZEROLORA, kill_rank, losses, wait_for
from tests.cluster.hosts import LOGIN, Hosts
from tests.cluster.ssh_daemons import start_sshd
from tests.foreign_files import write_foreign_files
from trainer.checkpoint.checkpoint_files import list_checkpoints

pytestmark = pytest.mark.slow


def train(workplace: Path, name: str, *options: str) -> list[str]:
    return [*ZEROLORA, "train", str(workplace / "config.yaml"), f"output_dir={workplace / name}", *options]


def assert_no_rank_is_left(hosts: Hosts) -> None:
    left = [found.cmdline() for node in ("n1", "n2") for found in hosts.processes(node)]
    assert not [command for command in left if "trainer.train" in command], left


def train_on(hosts: Hosts, env: Mapping[str, str], hostfile: Path, workplace: Path, name: str) -> subprocess.Popen[str]:
    """An endless run on both hosts that has taken its first step."""
    command = train(workplace, name, "--hostfile", str(hostfile), "training.max_steps=100000")
    process = hosts.start(LOGIN, command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_for(lambda: losses(workplace / name) or process.poll() is not None, lambda: "no step")
    return process


def test_a_hostfile_trains_on_both_hosts(
    hosts: Hosts, ssh: Mapping[str, str], hostfile: Path, workplace: Path, reference: list[float]
) -> None:
    """The folder has files that could be imported by mistake: DeepSpeed puts it into PYTHONPATH."""
    mark = write_foreign_files(here := hostfile.parent)
    command = [COMMAND, *train(workplace, "pdsh", "--hostfile", str(hostfile))[len(ZEROLORA) :]]
    done = hosts.run(LOGIN, command, env=ssh, cwd=here, timeout=600)
    assert done.returncode == 0 and not mark.exists(), done.stdout + done.stderr
    assert done.stdout.startswith("connecting to the hosts of ")
    assert "world        2 ranks on n1, n2: cpu" in done.stdout
    assert "torchao" not in done.stdout + done.stderr, "imported for nothing, and its warnings are the user's to read"
    assert losses(workplace / "pdsh") == pytest.approx(reference, rel=1e-4)


def test_ctrl_c_on_the_launching_host_saves_on_the_others(
    hosts: Hosts, ssh: Mapping[str, str], hostfile: Path, workplace: Path
) -> None:
    """The launching host runs no rank itself, and no rank outlives the command."""
    run = workplace / "interrupted"
    process = train_on(hosts, ssh, hostfile, workplace, run.name)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 130, out
    assert "stopped and saved at step" in out
    assert int(list_checkpoints(run)[-1].name.rpartition("-")[2]) == len(losses(run)) > 0
    assert_no_rank_is_left(hosts)


@pytest.mark.nightly
def test_a_rank_killed_on_another_host_is_137_and_takes_the_run_down(
    hosts: Hosts, ssh: Mapping[str, str], hostfile: Path, workplace: Path
) -> None:
    """The other rank is halted, so that only the launcher on n2 has seen how the one ended."""
    process = train_on(hosts, ssh, hostfile, workplace, "killed")
    kill_rank(hosts, "n2", other="n1")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 137, out
    assert "the run failed: rank 1 on n2 was killed by signal 9 (SIGKILL) (" in out
    assert_no_rank_is_left(hosts)


@pytest.mark.nightly
def test_a_lost_host_is_excluded_and_the_global_batch_stays(
    hosts: Hosts, ssh: Mapping[str, str], tmp_path: Path, workplace: Path, reference: list[float]
) -> None:
    """Everything on n2 ends, its sshd too. Of the three ranks left one is idle: three do not divide 8 samples."""
    (tmp_path / "hosts").write_text("n1 slots=3\nn2 slots=1\n")
    run = workplace / "left"
    options = ["training.elastic=true", "training.max_restarts=3", "training.gradient_accumulation_steps=1"]
    command = train(workplace, run.name, "--hostfile", str(tmp_path / "hosts"), *options)
    process = hosts.start(LOGIN, command, env=ssh, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_for(lambda: process.poll() is not None or (run.exists() and list_checkpoints(run)), lambda: "no checkpoint")
    for found in hosts.processes("n2"):
        found.kill()
    try:
        out, _ = process.communicate(timeout=600)
    finally:
        start_sshd(hosts, "n2", Path(ssh["PATH"].split(":")[0]).parent)
    assert process.returncode == 0, out
    assert "not reachable by ssh: n2" in out, out
    assert "continuing with 2 of 4 ranks; 3 ranks cannot split the batch of 8 samples" in out, out
    assert losses(run) == pytest.approx(reference, abs=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "world"),
    [
        (["--include", "n1:1@n2:0"], "2 ranks on n1, n2"),
        (["--exclude", "n1", "--num-nodes", "1", "--num-gpus", "2"], "2 ranks on n2"),
    ],
    ids=["a slot each", "two slots of the host that is left"],
)
def test_options_choose_hosts_and_slots(
    hosts: Hosts,
    ssh: Mapping[str, str],
    workplace: Path,
    tmp_path: Path,
    six_steps: list[float],
    options: list[str],
    world: str,
) -> None:
    (tmp_path / "hosts").write_text("n1 slots=2\nn2 slots=3\n")
    name = "chosen" + "".join(options)
    command = train(workplace, name, "--hostfile", str(tmp_path / "hosts"), *options, "training.max_steps=6")
    done = hosts.run(LOGIN, command, env=ssh, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"world        {world}: cpu" in (workplace / name / "logs" / "rank-0.log").read_text()
    assert losses(workplace / name) == pytest.approx(six_steps, rel=1e-4)


@pytest.mark.parametrize(
    ("text", "options", "complaint"),
    [
        (None, [], "no such file"),
        ("# none\n", [], "names no host"),
        ("n1 slots=1\nn1 slots=1\n", [], "names n1 again"),
        ("n1 slots=1\nnowhere slots=1\n", [], "nowhere: not reachable by ssh"),
        ("n1 slots=1\nn2 slots=1\n", ["--exclude", "n1@n2"], "leaves no GPU"),
    ],
    ids=["missing", "empty", "repeated", "unreachable", "nothing left"],
)
def test_a_bad_hostfile_is_never_this_machine_only(
    hosts: Hosts,
    ssh: Mapping[str, str],
    workplace: Path,
    tmp_path: Path,
    text: str | None,
    options: list[str],
    complaint: str,
) -> None:
    path = tmp_path / "hostfile"
    if text is not None:
        path.write_text(text)
    command = train(workplace, "refused", "--hostfile", str(path), *options)
    done = hosts.run(LOGIN, command, env=ssh, cwd=ROOT)
    assert done.returncode == 2 and complaint in done.stderr, done.stderr
    assert not (workplace / "refused").exists()
