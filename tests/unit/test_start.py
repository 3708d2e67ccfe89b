"""The start of a run: what is imported, what a rank does before the checks are done, where the time went."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from launcher.supervision.processes import run_child
from tests.distributed.conftest import environment
from tests.ends import HOST, TRAIN
from tests.tiny import write_chats

PATIENCE_S = 300.0
# Prints what is imported when the launcher has read its settings; when a rank waits, and after its first step.
OF_THE_LAUNCHER = "import sys, launcher.commands; print(*sys.modules, sep='\\n')"
OF_A_RANK = """
import gc, sys
import trainer.train
from trainer.contract.rank_arguments import StartMessage
from trainer.parallel.ranks.progress import PROGRESS
end = PROGRESS.take_startup_times
def ended():
    parts = end()
    if parts is not None:
        open("modules", "w").write("\\n".join(sys.modules))
    return parts
def released(channel):
    open("modules-before", "w").write("\\n".join(sys.modules))
    assert gc.isenabled() and gc.get_freeze_count() > 100_000
    return StartMessage(["run.yaml"], "log")
PROGRESS.take_startup_times, StartMessage.wait = ended, released
sys.argv[1:] = ["run.yaml", "--prestarted"]
sys.exit(trainer.train.main())
"""
NEVER_IN_THE_LAUNCHER = {"torch", "numpy", "transformers", "deepspeed", "peft", "bitsandbytes", "datasets", "pyarrow"}
NEVER_IN_A_RANK = {
    *("datasets", "pandas", "torchvision", "torchaudio", "matplotlib", "networkx", "sklearn", "scipy", "wandb"),
    *("torch._inductor.compile_fx", "torch._inductor.lowering", "torch._functorch.aot_autograd"),
    *("transformers.generation.utils.candidate_generator", "aiohttp", "IPython", "tensorflow", "jax", "torchao"),
}
BEFORE_THE_RELEASE = {
    *("torch.distributed.tensor", "torch._dynamo.symbolic_convert", "sympy", "transformers.modeling_utils"),
    *("deepspeed.runtime.engine", "deepspeed.runtime.zero.stage_1_and_2", "peft.tuners.lora.layer", "bitsandbytes"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, its data tokenised."""
    folder = tmp_path_factory.mktemp("start")
    settings = {
        "base_model": "random:tiny",
        "output_dir": "run",
        "output": {"overwrite": "delete"},
        "dataset": {"path": str(write_chats(folder / "chats.jsonl", 20)), "max_length": 64, "cache_dir": "cache"},
        "training": {"max_steps": 1, "batch_size": 1},
    }
    (folder / "run.yaml").write_text(json.dumps(settings))
    prepare = [sys.executable, "-m", "launcher.module", "trainer.commands.prepare_run", "run.yaml"]
    subprocess.run(prepare, cwd=folder, env=environment(), check=True, capture_output=True)
    return folder


@contextmanager
def train(folder: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """`zerolora train` of two ranks."""
    with subprocess.Popen(
        [*TRAIN, "run.yaml", "--num-gpus=2", *arguments],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


def held_ranks(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Both ranks, by their number, once they run."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        ranks = [child for child in psutil.Process(process.pid).children() if "--prestarted" in child.cmdline()]
        if len(ranks) == 2:
            return sorted(ranks, key=lambda rank: rank.environ()["RANK"])
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError("no ranks")


def assert_gone(ranks: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(ranks, timeout=60.0)
    assert not [rank for rank in alive if rank.status() != psutil.STATUS_ZOMBIE]


def test_the_launcher_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", OF_THE_LAUNCHER], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.split())
    assert "launcher.start" in imported and NEVER_IN_THE_LAUNCHER & imported == set()


def test_a_rank_imports_all_that_its_first_step_needs_before_its_release_and_nothing_else(folder: Path) -> None:
    here, there = socket.socketpair()
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    with here, there:
        done = subprocess.run(
            [sys.executable, "-c", OF_A_RANK],
            cwd=folder, env=environment() | place, stdin=there.fileno(), capture_output=True, text=True,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr + (folder / "log").read_text()
    before, after = (set((folder / name).read_text().split()) for name in ("modules-before", "modules"))
    assert before >= BEFORE_THE_RELEASE
    assert NEVER_IN_A_RANK & after == set()


@pytest.mark.distributed
def test_where_the_time_to_the_first_step_went_is_shown_and_recorded(folder: Path) -> None:
    with train(folder, "--verbose") as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    line = next(line for line in out.splitlines() if line.startswith("start        "))
    total, _, shown = line.removeprefix("start").partition(" s: ")
    parts = {name: float(seconds) for name, _, seconds in (part.rpartition(" ") for part in shown.split(", "))}
    assert list(parts)[:3] == ["command", "imports", "checks"]
    assert abs(sum(parts.values()) - float(total)) < 0.1 * len(parts)
    record = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert record["start/total_s"] == pytest.approx(float(total), abs=0.1)
    assert record["start/load_s"] == pytest.approx(parts.get("load", 0.0), abs=0.1)
    assert {"start/join_s", "start/start_engine_s", "start/first_step_s"} <= set(record), "also parts of no time"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("number", "code", "line"),
    [(signal.SIGINT, 130, "stopped"), (signal.SIGTERM, 143, "stopped by SIGTERM"), (signal.SIGUSR1, 75, None)],
)
def test_a_signal_before_the_checks_are_done_leaves_nothing(
    folder: Path, number: signal.Signals, code: int, line: str | None
) -> None:
    with train(folder, f"output_dir=stopped-{code}") as process:
        ranks = held_ranks(process)
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err.splitlines()) == (code, [line or "stopped by SIGUSR1"]), out
    assert_gone(ranks)
    assert not (folder / f"stopped-{code}").exists()


INTERRUPTS_ITS_LAUNCHER = """
import sys
from launcher.supervision.prestarted_ranks import PrestartedRanks
from launcher.targets.local import Command
ranks = Command(("sh", "-c", "kill -INT $PPID; exec sleep 300"), 2, {}, (), ({}, {}))
with PrestartedRanks.start(ranks) as held:
    print(*(process.pid for process in held.processes), flush=True)
    sys.exit(held.wait_for_checks())
"""


def test_ctrl_c_while_ranks_are_started_ends_them() -> None:
    """Held back meanwhile, it comes as soon as they run: an exception there would leave them to nobody."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTS_ITS_LAUNCHER], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "stopped\n")
    started = list(map(int, done.stdout.split()))
    assert len(started) == 2 and not any(map(psutil.pid_exists, started))


@pytest.mark.distributed
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_before_the_checks_are_done_is_named(folder: Path, rank: int) -> None:
    with train(folder, "output_dir=killed") as process:
        ranks = held_ranks(process)
        ranks[rank].kill()
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 137
    assert err.splitlines()[-1].startswith(
        f"the run failed during its checks: rank {rank} on {HOST} was killed by signal 9"
    )
    assert_gone(ranks)
    assert not (folder / "killed").exists()


@pytest.mark.distributed
def test_a_rank_that_is_stopped_before_the_checks_are_done_is_named(folder: Path) -> None:
    with train(folder, "output_dir=halted", "training.hang_timeout=0.05") as process:
        ranks = held_ranks(process)
        ranks[0].suspend()
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    line = f"the run failed during its checks: the run is hung: rank 0 on {HOST} is stopped (SIGSTOP, or a"
    assert err.splitlines()[-1].startswith(line), err
    assert_gone(ranks)
    assert not (folder / "halted").exists()


@pytest.mark.distributed
def test_ranks_that_wait_end_with_a_launcher_that_is_killed(folder: Path) -> None:
    with train(folder, "output_dir=orphaned") as process:
        ranks = held_ranks(process)
        process.kill()
        process.communicate(timeout=PATIENCE_S)
        assert_gone(ranks)
    assert not (folder / "orphaned").exists()


@pytest.mark.distributed
def test_rank_0_reports_an_error_in_one_line(folder: Path) -> None:
    with train(folder, "output_dir=refused", "lora.target_modules=[nowhere]") as process:
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert len(err.splitlines()) == 1 and err.startswith("error: lora.target_modules=")
    assert not (folder / "refused").exists()


def test_a_rank_whose_first_look_is_wrong_waits_for_the_first_rank_to_say_so(tmp_path: Path) -> None:
    """No UserError of another rank is reported twice."""
    from trainer.entry.prestart import _read_model_files

    assert _read_model_files(str(tmp_path / "missing.yaml"), []) is None


def test_the_times_of_all_phases_add_up_to_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.parallel.ranks.progress import Progress

    monkeypatch.delenv("ZEROLORA_LAUNCHER", raising=False)
    progress = Progress()
    with progress.phase("load"):
        time.sleep(0.02)
        with progress.phase("weights"):
            time.sleep(0.02)
    time.sleep(0.02)
    progress.begin_step(1)
    with progress.phase("backward"):
        time.sleep(0.02)
    parts = progress.take_startup_times()
    age = time.time() - psutil.Process(os.getpid()).create_time()
    assert parts is not None and progress.take_startup_times() is None
    assert parts["load"] >= 0.04 and parts["other"] >= 0.02 and parts["first step"] >= 0.02 and "weights" not in parts
    # The kernel tells when a process began in hundredths of a second, and when it began itself in whole ones.
    assert sum(parts.values()) == pytest.approx(age, abs=2.0)


def test_a_killed_preparation_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    killed = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    assert run_child(killed, "the run failed during its checks") == 137
    reported = rf"the run failed during its checks: process \d+ on {re.escape(HOST)} was killed by signal 9"
    assert re.match(reported, capsys.readouterr().err)
