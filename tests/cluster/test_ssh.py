"""Two hosts with an sshd each, reached through a hostfile by DeepSpeed's launcher over pdsh."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT, ZEROLORA, environment, losses, wait_for
from tests.cluster.hosts import LOGIN, Hosts, needs_root
from trainer.checkpoint import whole_checkpoints

pytestmark = pytest.mark.slow

SERVER = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
"""
CLIENT = """\
IdentityFile {folder}/user_key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


@pytest.fixture(scope="module")
def env(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """Both nodes let this user in; the environment of a shell whose `ssh` knows how."""
    needs_root("sshd", "ssh", "pdsh")
    folder = tmp_path_factory.mktemp("ssh")
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    (folder / "sshd_config").write_text(SERVER.format(folder=folder))
    (folder / "ssh_config").write_text(CLIENT.format(folder=folder))
    (folder / "bin").mkdir()
    (folder / "bin" / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder}/ssh_config "$@"\n')
    (folder / "bin" / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    daemons = [
        hosts.start(node, ["/usr/sbin/sshd", "-D", "-f", str(folder / "sshd_config")], stdin=subprocess.DEVNULL)
        for node in ("n1", "n2")
    ]
    env = environment()
    env["PATH"] = f"{folder}/bin:{env['PATH']}"
    for node in ("n1", "n2"):
        wait_for(lambda node=node: hosts.run(LOGIN, ["ssh", node, "true"], env=env).returncode == 0, lambda: "no sshd")
    yield env
    for daemon in daemons:
        daemon.terminate()


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hostfile"
    path.write_text("# the two nodes\nn1 slots=1\nn2 slots=1\n")
    return path


def train(workplace: Path, name: str, *options: str) -> list[str]:
    return [*ZEROLORA, "train", str(workplace / "config.yaml"), f"output_dir={workplace / name}", *options]


def test_a_hostfile_trains_on_both_hosts(
    hosts: Hosts, env: Mapping[str, str], hostfile: Path, workplace: Path, reference: list[float]
) -> None:
    done = hosts.run(LOGIN, train(workplace, "pdsh", "--hostfile", str(hostfile)), env=env, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "world        2 ranks on n1, n2: cpu" in done.stdout
    assert losses(workplace / "pdsh") == pytest.approx(reference, rel=1e-4)


def test_ctrl_c_on_the_launching_host_saves_on_the_others(
    hosts: Hosts, env: Mapping[str, str], hostfile: Path, workplace: Path
) -> None:
    """The launching host runs no rank itself, and no rank outlives the command."""
    run = workplace / "interrupted"
    command = train(workplace, "interrupted", "--hostfile", str(hostfile), "training.max_steps=100000")
    process = hosts.start(LOGIN, command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_for(lambda: losses(run) or process.poll() is not None, lambda: "no step")
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 130, out
    assert "stopped at step" in out
    assert int(whole_checkpoints(run)[-1].name.rpartition("-")[2]) == len(losses(run)) > 0
    left = [found.cmdline() for node in ("n1", "n2") for found in hosts.processes(node)]
    assert not [command for command in left if "trainer.train" in command], left


def test_a_rank_killed_on_another_host_takes_the_run_down(
    hosts: Hosts, env: Mapping[str, str], hostfile: Path, workplace: Path
) -> None:
    run = workplace / "killed"
    command = train(workplace, "killed", "--hostfile", str(hostfile), "training.max_steps=100000")
    process = hosts.start(LOGIN, command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_for(lambda: losses(run) or process.poll() is not None, lambda: "no step")
    for found in hosts.processes("n2"):
        if "trainer.train" in found.cmdline() and "deepspeed.launcher.launch" not in found.cmdline():
            found.kill()
    out, _ = process.communicate(timeout=300)
    assert process.returncode in (1, 137), out
    assert "rank 1 on n2" in out
    left = [found.cmdline() for node in ("n1", "n2") for found in hosts.processes(node)]
    assert not [command for command in left if "trainer.train" in command], left


@pytest.mark.parametrize(
    ("text", "options", "complaint"),
    [
        (None, [], "no such file"),
        ("# none\n", [], "names no host"),
        ("n1 slots=1\nn1 slots=1\n", [], "names n1 again"),
        ("n1 slots=1\nnowhere slots=1\n", [], "nowhere: not reached by ssh"),
        ("n1 slots=1\nn2 slots=1\n", ["--exclude", "n1@n2"], "leaves nothing"),
    ],
    ids=["missing", "empty", "repeated", "unreachable", "nothing left"],
)
def test_a_bad_hostfile_is_never_this_machine_only(
    hosts: Hosts,
    env: Mapping[str, str],
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
    done = hosts.run(LOGIN, command, env=env, cwd=ROOT)
    assert done.returncode == 2 and complaint in done.stderr, done.stderr
    assert not (workplace / "refused").exists()
