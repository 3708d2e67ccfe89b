"""Processes end with their launcher: a dead process, a file that stops changing, signals."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from trainer.contract.launcher_process import (
    ALIVE_FILE,
    LAUNCHER_VARIABLE,
    LauncherWatch,
    ProcessIdentity,
    export_launcher_identity,
)

CHECKOUT = Path(__file__).parents[2]
ELSEWHERE = "another-boot:1/1/1"
# Starts a process that trains: that one starts another, and then its main thread waits for ever.
LAUNCHER = """
import subprocess, sys
from trainer.contract.launcher_process import export_launcher_identity
export_launcher_identity()
child = '''
import subprocess, sys, time
from trainer.parallel.ranks.training_process import set_up_process
set_up_process()
subprocess.Popen(["sleep", "600"])
print("ready", flush=True)
time.sleep(600)
'''
subprocess.run([sys.executable, "-c", child], start_new_session=True)
"""


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_a_mark_is_of_one_process_alone(other: "subprocess.Popen[bytes]") -> None:
    mark = ProcessIdentity.read(other.pid)
    assert mark is not None and ProcessIdentity.parse(str(mark)) == mark
    assert mark.is_visible() and mark.is_alive()
    psutil.Process(other.pid).suspend()
    assert mark.is_alive(), "stopped, not dead"
    assert not ProcessIdentity(mark.kernel, mark.pid, "1").is_alive(), "the number was given again"
    other.kill()
    while psutil.Process(other.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert not mark.is_alive(), "it only waits to be collected"
    other.wait()
    assert not mark.is_alive() and ProcessIdentity.read(other.pid) is None
    assert ProcessIdentity.parse("") is None and ProcessIdentity.parse("a/b/c") is None
    assert not ProcessIdentity.parse(ELSEWHERE).is_visible()  # type: ignore[union-attr]


def test_a_launcher_on_this_host_is_checked_directly(other: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    watch = LauncherWatch({LAUNCHER_VARIABLE: str(ProcessIdentity.read(other.pid))}, is_rank=True)
    watch.watch_file(tmp_path, 0.01)
    (tmp_path / ALIVE_FILE).touch()
    for _ in range(3):
        assert watch.describe_lost_launcher() is None, "its file does not matter"
        time.sleep(0.02)
    other.kill()
    other.wait()
    assert f"the zerolora process {other.pid}" in str(watch.describe_lost_launcher())
    assert LauncherWatch({}, is_rank=True).describe_lost_launcher() is None


def test_a_launcher_elsewhere_counts_as_dead_when_its_file_stays_the_same(tmp_path: Path) -> None:
    watch = LauncherWatch({LAUNCHER_VARIABLE: ELSEWHERE}, is_rank=True)
    watch.watch_file(tmp_path, 0.3)
    assert watch.describe_lost_launcher() is None
    time.sleep(0.4)
    assert watch.describe_lost_launcher() is None, "there is no file: hosts without a shared folder"
    file = tmp_path / ALIVE_FILE
    for hour in (1, 9, 3):  # no clock is asked which of them is later
        file.touch()
        os.utime(file, (3600 * hour,) * 2)
        assert watch.describe_lost_launcher() is None
        time.sleep(0.2)
    time.sleep(0.2)
    assert "no heartbeat of the zerolora process for 0.3 s" in str(watch.describe_lost_launcher())
    file.touch()
    assert watch.describe_lost_launcher() is None
    file.unlink()
    time.sleep(0.4)
    assert watch.describe_lost_launcher() is not None, "it was there"
    watch.watch_file(tmp_path, 0.0)
    assert watch.describe_lost_launcher() is None, "0 turns it off"


def test_a_connection_that_is_closed_is_no_dropped_network(tmp_path: Path) -> None:
    """The ranks' stderr ends at the sshd of their host, which closes it when the ssh of the other host has ended."""
    reader, writer = os.pipe()
    stderr = os.dup(2)
    os.dup2(writer, 2)
    try:
        watch = LauncherWatch({LAUNCHER_VARIABLE: ELSEWHERE}, is_rank=True)
    finally:
        os.dup2(stderr, 2)
    assert watch.describe_lost_launcher() is None
    os.close(reader)
    assert "connection" in str(watch.describe_lost_launcher())


# In place of srun: ends its ranks on SIGTERM. The rank is in its own session.
SRUN = """
trap 'kill -9 $rank; exit 9' TERM
setsid sleep 600 & rank=$!
echo $rank; wait $rank
"""


def test_a_killed_launchers_child_launcher_ends_its_ranks() -> None:
    program = "import sys; from trainer.contract.launcher_process import *; export_launcher_identity()\n"
    program += "from launcher.targets.local import Command\n"
    program += "Command(('sh', '-c', sys.argv[1]), 1, {}, ()).start(1, 2)[0].wait()"
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    command = [sys.executable, "-c", program, SRUN]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        rank = psutil.Process(int(launcher.stdout.readline()))
        below = [*psutil.Process(launcher.pid).children(recursive=True), rank]
        launcher.kill()
    _, alive = psutil.wait_procs(below, timeout=300)
    assert alive == []


def test_ranks_know_only_torchrun_and_deepspeed_by_their_variables() -> None:
    assert LauncherWatch({"RANK": "0"}, is_rank=True)._starter is None, "a script may have put it in the background"
    for name in ("TORCHELASTIC_RUN_ID", "CROSS_RANK"):
        assert LauncherWatch({name: "0"}, is_rank=True)._starter == ProcessIdentity.read(os.getppid())
        assert LauncherWatch({name: "0"}, is_rank=False)._starter is None


def test_a_launcher_that_is_killed_takes_everything_along(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    with subprocess.Popen([sys.executable, "-c", LAUNCHER], env=environment, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None and launcher.stdout.readline() == b"ready\n"
        below = psutil.Process(launcher.pid).children(recursive=True)
        assert [process.name() for process in below][-1] == "sleep" and len(below) == 2
        psutil.Process(launcher.pid).suspend()
        time.sleep(2.5)
        assert all(process.is_running() for process in below)
        launcher.kill()
    _, alive = psutil.wait_procs(below, timeout=300)
    assert alive == []


def test_children_are_tied_to_the_process_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHER_VARIABLE, ELSEWHERE)
    export_launcher_identity()
    assert ProcessIdentity.parse(os.environ[LAUNCHER_VARIABLE]) == ProcessIdentity.read(os.getpid())
