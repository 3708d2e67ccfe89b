"""`zerolora adapters`: add an adapter to a running run and remove one, from end to end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.supervision.restarts import AttemptResult, RestartLoop
from tests.tiny import write_training
from trainer.contract.restart_record import AdapterChanges, apply_recorded_changes, read_restarts

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
TIMEOUT_S = 900
A, B, C = ({"name": name, "seed": seed} for seed, name in enumerate("abc"))


def zerolora(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "launcher.cli", *arguments]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S)


def wait_for(condition: Callable[[], object], process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.2)


@pytest.fixture
def ground(tmp_path: Path) -> Path:
    (tmp_path / "new.yaml").write_text("name: new\nseed: 5\nlora: {r: 4}\n")
    adapters = "adapters: [{name: a}, {name: b, seed: 1}]\n"
    return write_training(tmp_path, "", "max_steps: 100000, save_steps: 20", adapters)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_running_run_gets_an_adapter_and_loses_one(ground: Path) -> None:
    runs = ground / "runs"
    command = [sys.executable, "-m", "launcher.cli", "train", "c.yaml"]
    with (ground / "out.txt").open("wb") as out:
        process = subprocess.Popen(command, cwd=ground, env=ENVIRONMENT, stdout=out, stderr=out)
    try:
        wait_for(lambda: [*runs.glob("a/checkpoint-*/COMPLETE")], process)
        added = zerolora(ROOT, "adapters", "add", str(runs), str(ground / "new.yaml"))
        assert added.returncode == 0, added.stderr
        wait_for(lambda: [*runs.glob("new/checkpoint-*/COMPLETE")], process)
        assert zerolora(ROOT, "adapters", "remove", str(runs), "b").returncode == 0
        wait_for(lambda: len(read_restarts(runs)) == 2, process)
        before = {path.name for path in runs.glob("b/checkpoint-*")}
        newest = len((runs / "new" / "metrics.jsonl").read_text().splitlines())
        wait_for(lambda: len((runs / "new" / "metrics.jsonl").read_text().splitlines()) > newest + 20, process)
        assert {path.name for path in runs.glob("b/checkpoint-*")} == before
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_S) == 130, (ground / "out.txt").read_text()
    assert read_restarts(runs)[0].checkpoint.startswith(("a/checkpoint-", "b/checkpoint-"))


def test_mistakes_change_nothing(ground: Path) -> None:
    runs = ground / "runs"
    assert "not a run with several adapters" in zerolora(ground, "adapters", "remove", "runs", "a").stderr
    record = AdapterChanges(["c.yaml"], str(ground))
    record.write(runs)
    (ground / "bad.yaml").write_text("name: a\n")
    (ground / "shared.yaml").write_text("name: shared\nzero: {stage: 1}\n")
    for arguments, expected in (
        (("add", "runs", "bad.yaml"), "already"),
        (("add", "runs", "shared.yaml"), "zero.stage"),
        (("remove", "runs", "x"), "use one of a, b"),
        (("drop", "runs", "a"), "use add or remove"),
    ):
        done = zerolora(ground, "adapters", *arguments)
        assert done.returncode == 2 and expected in done.stderr, done
    assert AdapterChanges.read(runs) == record


def test_the_list_is_changed_by_name(tmp_path: Path) -> None:
    assert apply_recorded_changes(tmp_path, [A]) == [A]
    AdapterChanges(["c.yaml"], ".", added=[C], removed=["a"]).write(tmp_path)
    assert apply_recorded_changes(tmp_path, [A, B]) == [B, C] and apply_recorded_changes(tmp_path, []) == []
    assert apply_recorded_changes(tmp_path, [C, B]) == [C, B], "these have the changes already"
    new = {"name": "a", "seed": 9}
    AdapterChanges([], "", added=[new], removed=["a"]).write(tmp_path)
    assert apply_recorded_changes(tmp_path, [A, B]) == [B, new]


def test_a_run_that_stopped_for_a_change_resumes_with_it(tmp_path: Path) -> None:
    settings: list[list[str]] = []

    def start(given: object) -> AttemptResult:
        settings.append(list(given))  # type: ignore[call-overload]
        if len(settings) == 1:
            AdapterChanges([], "", added=[C]).write(tmp_path)
        return AttemptResult(0, ranks=1, step=len(settings), has_completed_step=True)

    assert RestartLoop(tmp_path, start, max_restarts=0, resumes=False, adapters=[A, B]).run() == 0
    assert len(settings) == 2 and not settings[0]
    assert 'adapters=[{"name": "a", "seed": 0}' in settings[1][0] and '"c"' in settings[1][0]
    assert "training.resume_from_checkpoint=auto" in settings[1] and "output.overwrite=false" in settings[1]
