"""How runs end: every exit code of `zerolora train`, what its last lines say, and what the watchdog sees.

Real runs of two CPU ranks on a tiny model; what goes wrong in a rank comes from mischief/sitecustomize.py.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.distributed.conftest import environment
from tests.ends import HOST, PATIENCE_S, TRAIN, Run, Start, runs_below, write_endless_run
from trainer.checkpoint.checkpoint_files import list_checkpoints
from trainer.contract.rendezvous import find_free_port

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "trainer.train")
DEEPSPEED = ("deepspeed", "--num_gpus=2", f"--master_port={find_free_port()}", "--module", "trainer.train")
# Minutes; the first step may take three times as long. No step does on a machine that is busy with others.
SOON = "training.hang_timeout=0.25"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_endless_run(tmp_path_factory.mktemp("ends"))


@pytest.fixture
def start(workplace: Path, tmp_path: Path) -> Iterator[Start]:
    with runs_below(tmp_path, environment()) as start_run:

        def start(*settings: str, mischief: str = "", launcher: tuple[str, ...] = TRAIN, folder: str = "run") -> Run:
            command = [*launcher, str(workplace / "config.yaml")]
            return start_run(command, *settings, mischief=mischief, name=folder)

        yield start


def assert_nobody_is_left(run: Run) -> None:
    for rank in (0, 1):
        pid = run.pid(rank)
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_user_error_exits_with_2(start: Start, tmp_path: Path) -> None:
    code, out, err = start("lora.r=0").end()
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_failed_rank_is_1_and_named_with_its_host_step_and_traceback(start: Start) -> None:
    code, _, err = start(mischief="1:raise:9").end()
    assert code == 1, err
    lines = err.splitlines()
    assert lines[0].startswith(f"the run failed: rank 1 on {HOST} exited with code 1 (step "), err
    assert "ValueError: the middle of the model is missing" in err
    assert lines[-1].endswith("rank-1.log")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=str
)
def test_a_signal_to_one_rank_stops_all_of_them_with_a_checkpoint(start: Start, number: int, code: int) -> None:
    """As a scheduler or a hasty administrator does it; the ranks agree, and the run can resume."""
    run = start()
    run.wait_for_step(3)
    os.kill(run.pid(1), number)
    ended, out, err = run.end()
    assert ended == code, err
    assert "saved at step" in out
    assert [run.beat(rank)["exit_code"] for rank in (0, 1)] == [code, code]
    checkpoint = list_checkpoints(run.logs.parent)[-1]
    if number != signal.SIGUSR1:
        return
    step = int(checkpoint.name.split("-")[1])
    again = start(f"training.max_steps={step + 2}", "training.resume_from_checkpoint=auto")
    ended, out, err = again.end()
    assert ended == 0, err
    assert f"resumed from {checkpoint} at step {step}" in out
    beats = [again.beat(rank) for rank in (0, 1)]
    assert [(beat["exit_code"], beat["step"]) for beat in beats] == [(0, step + 2)] * 2


def test_preemption_of_the_launcher_is_75(start: Start) -> None:
    """SIGUSR1 comes to the batch script's child; the scheduler's SIGTERM a little later changes nothing."""
    run = start()
    run.wait_for_step(3)
    run.process.send_signal(signal.SIGUSR1)
    time.sleep(0.7)
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.end()
    assert code == 75, err
    assert list_checkpoints(run.logs.parent)


def test_preemption_before_the_first_step_is_75_too(start: Start) -> None:
    """Rank 1 loads for 8 s, so no rank can have taken a step when the signal comes."""
    run = start(mischief="1:slow load:1")
    run.wait_for_phase("load", 1)
    run.process.send_signal(signal.SIGUSR1)
    beats = [run.beat(rank) for rank in (0, 1)]
    assert [beat["step"] for beat in beats] == [0, 0] and str(beats[1]["phase"]).startswith("load"), beats
    code, _, err = run.end()
    assert code == 75, err
    assert [int(str(run.beat(rank)["step"])) <= 1 for rank in (0, 1)] == [True, True]


def test_a_killed_rank_is_137_with_the_usual_cause(start: Start) -> None:
    """Long before the collective in which the other rank waits would give up (`timeout_minutes`)."""
    run = start()
    run.wait_for_step(3)
    os.kill(run.pid(1), signal.SIGKILL)
    code, _, err = run.end()
    assert code == 137
    first, second, *_ = err.splitlines()
    assert first.startswith(f"the run failed: rank 1 on {HOST} was killed by signal 9 (SIGKILL) (step "), err
    assert "the host probably ran out of memory" in second and "GiB were free" in second
    assert_nobody_is_left(run)


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup with a limit of 64 MiB."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        folder = Path(root) / f"zerolora-test-{os.getpid()}"
        try:
            folder.mkdir()
            (folder / limit).write_text(str(64 * 2**20))
        except OSError:
            if folder.exists():
                folder.rmdir()
            continue
        yield folder
        members = folder / "cgroup.procs"
        _wait_for(partial(_is_empty, members))
        folder.rmdir()
        return
    pytest.skip("needs the right to make memory cgroups")


def test_an_oom_killed_rank_is_reported_as_such(start: Start, small_cgroup: Path) -> None:
    run = start(mischief="1:eat:400")
    run.wait_for_step(2)
    (small_cgroup / "cgroup.procs").write_text(str(run.pid(1)))
    code, _, err = run.end()
    assert code == 137, err
    assert "the host probably ran out of memory" in err


def test_a_stopped_rank_is_named_with_its_stack(start: Start) -> None:
    run = start(SOON)
    run.wait_for_step(3)
    os.kill(run.pid(1), signal.SIGSTOP)
    code, _, err = run.end()
    assert code == 1, err
    first = err.splitlines()[0]
    assert first.startswith(
        f"the run failed: the run is hung: rank 1 on {HOST} (process {run.pid(1)}) no longer sends heartbeats"
    ), err
    assert "the process is stopped (SIGSTOP, or a debugger)" in first
    assert "; rank 0 waits for it in" in first
    assert '  File "' in err, "its stack, written once it was allowed to run again"
    assert_nobody_is_left(run)


@pytest.mark.nightly
def test_a_rank_stopped_before_its_first_heartbeat_is_named(start: Start) -> None:
    """The other waits where the ranks meet, which takes a little of the processor and is no work."""
    code, _, err = start(SOON, mischief="1:stop@begin:1").end()
    assert code == 1
    assert err.startswith(
        f"the run failed: the run is hung: rank 1 on {HOST} has sent no heartbeat since it was started: it is "
        "stopped, or its host is down; rank 0 waits for it in join/meet"
    ), err


def test_a_rank_that_hangs_before_a_collective_is_named(start: Start) -> None:
    code, _, err = start(SOON, mischief="1:hang:9").end()
    assert code == 1, err
    first = err.splitlines()[0]
    assert re.match(
        rf"the run failed: the run is hung: rank 1 on {HOST} \(process \d+\) has made no progress for 0\.\d min", first
    )
    position = r"step \d+, (phase .*|between phases), at tests/cluster/mischief/sitecustomize.py:\d+ misbehave"
    assert re.search(position, first), first
    assert re.search(r"; rank 0 waits for it in (all_reduce|allreduce|reduce)", first), first
    assert "in train_step" in err, "its stack"


@pytest.mark.nightly
def test_a_slow_save_is_no_hang(start: Start) -> None:
    """A thread of rank 0 works far longer than the limit, while both ranks wait for it at the end."""
    code, _, err = start(SOON, "training.max_steps=12", "training.save_steps=8", mischief="0:slow save:1").end()
    assert code == 0, err


@pytest.mark.nightly
def test_a_save_that_does_not_move_is_a_hang(start: Start) -> None:
    code, _, err = start(SOON, "training.max_steps=12", "training.save_steps=8", mischief="0:dead save:1").end()
    assert code == 1, err
    first = err.splitlines()[0]
    assert f"rank 0 on {HOST}" in first and "phase save" in first and "rank 1 waits for it in" in first, err


# Phase of the run when its launcher is killed: what holds it there, and how to see that it got there.
PHASES = {
    "tokenise": (":dead tokenise:1", lambda run: list((run.logs.parents[1] / "cache").glob("*.building"))),
    "load": ("0:dead load:1", lambda run: run.beat(0).get("phase") == "load"),
    "first step": ("1:hang:2", lambda run: run.beat(0)["step"] == 1),
    "step": ("", lambda run: int(str(run.beat(0)["step"])) > 3),
    "evaluate": ("1:dead evaluate:2", lambda run: run.beat(1).get("phase") == "evaluate" and run.beat(1)["step"]),
    # The thread of rank 1 does not come to an end with the second checkpoint, for which the third has to wait.
    "save": ("1:dead save:3", lambda run: run.beat(0)["step"] == 6 and run.beat(0).get("phase") == "save"),
}


@pytest.mark.parametrize("phase", PHASES)
def test_nothing_outlives_a_launcher_that_is_killed(start: Start, tmp_path: Path, phase: str) -> None:
    """A launcher that was only stopped (SIGSTOP, SIGCONT) does not count; an older checkpoint stays complete."""
    mischief, is_there = PHASES[phase]
    settings = [f"dataset.cache_dir={tmp_path / 'cache'}", "dataset.val_split=0.1"]
    run = start(*settings, "training.eval_steps=3", "training.save_steps=2", mischief=mischief)
    _wait_for(lambda: bool(is_there(run)))
    process = psutil.Process(run.process.pid)
    below = process.children(recursive=True)
    assert below
    if phase == "step":
        process.suspend()
        time.sleep(4.0)
        assert all(child.is_running() for child in below), "a launcher that is stopped is alive"
    process.kill()
    run.process.wait()
    _, alive = psutil.wait_procs(below, timeout=PATIENCE_S)
    assert alive == []
    if phase == "save":
        assert [path.name for path in list_checkpoints(run.logs.parent)] == ["checkpoint-2"]
    if phase == "tokenise":
        assert not run.logs.exists()


@pytest.mark.parametrize("launcher", [TORCHRUN, DEEPSPEED], ids=["torchrun", "deepspeed"])
def test_ranks_end_with_a_foreign_launcher(start: Start, launcher: tuple[str, ...]) -> None:
    run = start(launcher=launcher)
    run.wait_for_step(3)
    ranks = [psutil.Process(run.pid(rank)) for rank in (0, 1)]
    parent = ranks[0].parent()
    assert parent is not None
    parent.kill()
    _, alive = psutil.wait_procs(ranks, timeout=PATIENCE_S)
    assert alive == []
    run.process.wait()


def test_torchrun_names_the_hanging_rank_too(start: Start) -> None:
    run = start(SOON, launcher=TORCHRUN)
    run.wait_for_step(3)
    os.kill(run.pid(1), signal.SIGSTOP)
    # The other rank has decided, and says so next.
    _wait_for(lambda: "\nhang: " in _text(run.logs / "rank-0.log"))
    os.kill(run.pid(1), signal.SIGCONT)  # torchrun waits half a minute for a rank that is stopped
    code, _, err = run.end()
    assert code == 1
    assert f"error: the run is hung: rank 1 on {HOST}" in err, err
    assert "Python stack of rank 1:" in (run.logs / "rank-1.log").read_text()


def test_torchrun_shows_the_error_of_the_failed_rank(start: Start) -> None:
    code, _, err = start(launcher=TORCHRUN, mischief="1:raise:9").end()
    assert code == 1
    assert "ValueError: the middle of the model is missing" in err, err


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _is_empty(file: Path) -> bool:
    return not file.read_text()


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
