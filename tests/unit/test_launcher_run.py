"""`zerolora train`'s supervisor around real processes: exit codes, signals, last words, no orphans.

All runs are started together, because each waits seconds for imports; the tests then look at one each.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

CHECKOUT = Path(__file__).parents[2]
BEHAVIOURS = {
    "finish": "finish",
    "raise": "raise",
    "killed": "killed",
    "terminated": "save",
    "interrupted": "save",
    "preempted": "save",
    "impatient": "deaf",
    "both killed": "both killed",
    "early": "early",
    "late": "late",
    "alone": "alone",
    "one signalled": "alone",
    "bereaved": "bereaved",
    "folder returns": "folder",
    "folder lost": "folder",
}
PATIENCE_S = 300.0
pytestmark = pytest.mark.distributed


@dataclass
class Run:
    folder: Path
    process: subprocess.Popen[bytes]

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not all((self.folder / f"ready-{rank}").exists() for rank in (0, 1)):
            assert self.process.poll() is None and time.monotonic() < deadline, self.text("err")
            time.sleep(0.05)

    def wait_until_told(self, words: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while words not in self.text("err"):
            assert self.process.poll() is None and time.monotonic() < deadline, self.text("err")
            time.sleep(0.05)

    def end(self) -> int:
        return self.process.wait(timeout=PATIENCE_S)

    def text(self, stream: str) -> str:
        return (self.folder / stream).read_text()

    def left_behind(self) -> list[list[str]]:
        commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        return [command for command in commands if str(self.folder) in command]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    # RANK in the environment, as an outer job may leave it, must not make the supervisor see ranks everywhere.
    environment = os.environ | {"RANK": "7", "OMP_NUM_THREADS": "1"}
    started: dict[str, Run] = {}
    for name, behaviour in BEHAVIOURS.items():
        folder = tmp_path_factory.mktemp(name)
        with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.unit.launcher_driver", behaviour, str(folder)],
                cwd=CHECKOUT, env=environment, stdout=out, stderr=err,
            )  # fmt: skip
        started[name] = Run(folder, process)
    yield started
    for run in started.values():
        if run.process.poll() is None:
            run.process.terminate()
            time.sleep(1.0)
            run.process.terminate()


def test_success(runs: dict[str, Run]) -> None:
    run = runs["finish"]
    assert run.end() == 0
    assert run.text("out") == "console line of finish\n"
    assert run.text("err") == ""
    assert run.left_behind() == []


def test_a_failed_rank_is_named_with_its_traceback(runs: dict[str, Run]) -> None:
    run = runs["raise"]
    assert run.end() == 1
    lines = run.text("err").splitlines()
    assert lines[0] == f"the run failed: rank 1 on {socket.gethostname()} exited with code 1 (step 10)"
    assert lines[-2].strip() == "ValueError: the middle of the model is missing"
    assert lines[-1] == f"full log: {run.folder}/logs/rank-1.log"
    assert len(lines) <= 15
    assert run.left_behind() == []


def test_a_killed_rank_takes_the_run_down(runs: dict[str, Run]) -> None:
    run = runs["killed"]
    assert run.end() == 128 + signal.SIGKILL
    lines = run.text("err").splitlines()
    assert lines[0] == f"the run failed: rank 1 on {socket.gethostname()} was killed by signal 9 (SIGKILL) (step 10)"
    assert "the host probably ran out of memory" in lines[1]
    assert lines[-1].startswith("full log")
    assert run.left_behind() == []


@pytest.mark.parametrize(
    ("name", "number", "code"),
    [("terminated", signal.SIGTERM, 143), ("interrupted", signal.SIGINT, 130), ("preempted", signal.SIGUSR1, 75)],
)
def test_a_signal_reaches_every_rank_and_their_save_is_waited_for(
    runs: dict[str, Run], name: str, number: signal.Signals, code: int
) -> None:
    run = runs[name]
    run.wait_until_ready()
    run.process.send_signal(number)
    assert run.end() == code
    assert [run.text(f"saved-{rank}") for rank in (0, 1)] == [number.name] * 2
    again = "Ctrl-C" if number == signal.SIGUSR1 else "another signal"
    assert run.text("err").splitlines() == [f"{number.name}: saving a checkpoint, then stopping; {again} stops at once"]
    assert run.left_behind() == []


def test_a_second_interrupt_ends_ranks_that_do_not_listen(runs: dict[str, Run]) -> None:
    run = runs["impatient"]
    run.wait_until_ready()
    run.process.send_signal(signal.SIGINT)
    while "another signal stops at once" not in run.text("err"):
        assert run.process.poll() is None
        time.sleep(0.05)
    time.sleep(2.0)
    assert run.process.poll() is None, "one interrupt must wait for the ranks"
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130  # the ranks would never end
    assert run.left_behind() == []


def test_the_rank_that_was_killed_first_is_named_at_its_step(runs: dict[str, Run]) -> None:
    run = runs["both killed"]
    assert run.end() == 128 + signal.SIGKILL
    line = f"the run failed: rank 0 on {socket.gethostname()} was killed by signal 9 (SIGKILL) (step 9)"
    assert run.text("err").splitlines()[0] == line


@pytest.mark.parametrize("name", ["late", "alone"])
def test_ranks_waiting_for_a_stopped_rank_are_no_failure(runs: dict[str, Run], name: str) -> None:
    """The waiting rank gets an error, or in a collective of NCCL no signal, which would be reported as a hang."""
    run = runs[name]
    run.wait_until_ready()
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 143
    assert run.text("err") == "SIGTERM: saving a checkpoint, then stopping; another signal stops at once\n"
    assert run.left_behind() == []


def test_a_save_completes_after_another_rank_died_in_it(runs: dict[str, Run]) -> None:
    """For longer than what waits in vain is given."""
    run = runs["bereaved"]
    run.wait_until_ready()
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 143
    assert run.text("saved-0") == "SIGTERM" and not (run.folder / "saved-1").exists()
    assert "a rank has failed; the other ranks have 60 s to save" in run.text("err")
    assert run.left_behind() == []


def test_an_external_signal_to_one_rank_ends_all(runs: dict[str, Run]) -> None:
    run = runs["one signalled"]
    run.wait_until_ready()
    os.kill(int(run.text("ready-0")), signal.SIGTERM)
    assert run.end() == 143
    assert run.text("err") == ""
    assert run.left_behind() == []


def test_a_stop_before_the_first_step_promises_no_checkpoint_and_does_not_wait(runs: dict[str, Run]) -> None:
    run = runs["early"]
    run.wait_until_ready()
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 143
    assert run.text("err") == "SIGTERM: stopping, before the first step; another signal stops at once\n"
    assert run.left_behind() == []


def test_a_temporarily_unreadable_folder_does_not_hide_how_ranks_ended(runs: dict[str, Run]) -> None:
    """Where a file server was there is an empty mount point, in which the run's lock may be made again."""
    run = runs["folder returns"]
    run.wait_until_ready()
    logs, server = run.folder / "logs", run.folder / "server"
    logs.rename(server)
    run.wait_until_told("the run's folder cannot be read")
    logs.mkdir()
    (logs / "lock.json").touch()
    run.wait_until_told("waiting up to 120 s for its folder")
    time.sleep(2.0)
    assert run.process.poll() is None, run.text("err")
    (logs / "lock.json").unlink()
    logs.rmdir()
    server.rename(logs)
    assert run.end() == 1
    lines = run.text("err").splitlines()
    assert "the run's folder can be read again" in lines
    assert lines[0].startswith("the run's folder cannot be read: ") and str(run.folder / "logs") in lines[0]
    assert f"the run failed: rank 1 on {socket.gethostname()} exited with code 1 (step 10)" in lines
    assert "OSError: no file server" in run.text("err")
    assert run.left_behind() == []


@pytest.mark.slow
def test_a_folder_is_not_waited_for_after_a_signal(runs: dict[str, Run]) -> None:
    run = runs["folder lost"]
    run.wait_until_ready()
    (run.folder / "logs").rename(run.folder / "server")
    run.wait_until_told("waiting up to 120 s for its folder")
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 143
    assert "Traceback" not in run.text("err")
    assert run.left_behind() == []
