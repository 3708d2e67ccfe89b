"""`zerolora sweep`: which runs, where, in which order, what is noted of them, and the table of what came of them."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from launcher import sweep as sweep_module
from launcher.commands import main as zerolora
from launcher.sweep import Run, go_through, plan_runs, read_record, slots_of, split_axes, write_record
from trainer.commands.sweep_table import main as show_table
from trainer.commands.sweep_table import outcomes
from trainer.config import UserError

CONFIG = "base_model: m\noutput_dir: runs/s\ndataset: {path: d}\n"


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    Path("c.yaml").write_text(CONFIG)
    return Path("c.yaml")


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["zerolora", *words])
    return zerolora()


def test_values_with_commas_are_tried_and_lists_are_not() -> None:
    words = [
        "lora.r=8,16",
        "seed=3",
        "lora.target_modules=q_proj,v_proj",
        "dataset.fields={a: b, c: d}",
        "lr=1e-4,2e-4",
    ]
    axes, fixed = split_axes(words)
    assert axes == ["lora.r=8,16", "lr=1e-4,2e-4"] and fixed == [words[1], words[2], words[3]]
    with pytest.raises(UserError, match="must read key=value,value"):
        split_axes(["lora.r"])


def test_every_combination_has_a_folder_and_is_checked(config: Path) -> None:
    runs = plan_runs(config, ["lora.r=8,16", "seed=1,2"], ["zero.stage=0"], Path("runs/s").absolute())
    assert [run.name for run in runs] == ["r=8,seed=1", "r=8,seed=2", "r=16,seed=1", "r=16,seed=2"]
    assert runs[3].settings[:3] == ["zero.stage=0", "lora.r=16", "seed=2"]
    with pytest.raises(UserError, match=r"lora\.r=0: must be 1 or more \(command line\)"):
        plan_runs(config, ["lora.r=8,0"], [], Path("runs/s"))
    with pytest.raises(UserError, match="1,089 runs, and 1,000 are the most"):
        numbers = ",".join(map(str, range(1, 34)))
        plan_runs(config, [f"lora.r={numbers}", f"seed={numbers}"], [], Path("runs/s"))


def test_gpus_are_shared_out() -> None:
    assert slots_of([0, 1, 2, 3, 4], 2) == [[0, 1], [2, 3]]
    assert slots_of([0, 1], None) == slots_of([], 2) == [()]
    with pytest.raises(UserError, match="--gpus-per-run 3: this machine offers 2"):
        slots_of([0, 1], 3)


def test_nothing_is_started_by_a_look(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "sweep", "c.yaml", "lora.r=8,16", "seed=5", "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("zerolora train c.yaml seed=5 lora.r=8 output_dir=")
    assert lines[0].endswith("/runs/s/r=8 training.resume_from_checkpoint=auto")
    words = ("sweep", "c.yaml", "lora.r=8,16", "--slurm", "--dry-run", "--nodes", "2", "--time", "1:00:00")
    assert run(monkeypatch, *words) == 0
    assert capsys.readouterr().out == "zerolora submit c.yaml --sweep lora.r=8,16 --nodes 2 --time 1:00:00\n"
    assert run(monkeypatch, "sweep", "c.yaml", "seed=5") == 2 and "nothing to try" in capsys.readouterr().err
    assert run(monkeypatch, "sweep", "c.yaml", "lora.r=8,16", "--nodes", "2") == 2
    assert (
        "--nodes: not an option of `zerolora sweep`; those of `zerolora submit` need --slurm" in capsys.readouterr().err
    )
    assert sorted(os.listdir()) == ["c.yaml"]


def program(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are this Python program, its argument being the run's folder."""
    monkeypatch.setattr(
        sweep_module, "command", lambda config, run, each: [sys.executable, "-c", text, str(run.folder)]
    )


def test_runs_side_by_side_and_what_is_noted(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(
        "import os, sys, time; time.sleep(1); print(os.environ['CUDA_VISIBLE_DEVICES']); "
        "sys.exit(3 if sys.argv[1].endswith('2') else 0)",
        monkeypatch,
    )
    folder = Path("runs/s").absolute()
    runs = plan_runs(config, ["seed=1,2,3"], [], folder)
    go_through(config, runs, [[0], [1]], 1, folder)
    assert [run.exit_code for run in runs] == [0, 3, 0]
    assert [(folder / f"seed={seed}.log").read_text().strip() in ("0", "1") for seed in (1, 2, 3)] == [True] * 3
    again = plan_runs(config, ["seed=1,2,3"], [], folder)
    assert [run.exit_code for run in again] == [0, None, 0], "what failed is tried again, what is done is not"
    (folder / "seed=1").mkdir()
    with pytest.raises(UserError, match="seed=1: an earlier sweep trained it with other settings"):
        plan_runs(config, ["seed=1,2,3"], ["lora.r=4"], folder)


def test_a_signal_is_passed_on_and_waited_for(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(
        "import signal, sys, time, pathlib\n"
        "def stop(*_): time.sleep(0.5); pathlib.Path('saved').touch(); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, stop); pathlib.Path('ready').touch(); time.sleep(60)",
        monkeypatch,
    )
    folder = Path("runs/s").absolute()
    pause = time.sleep

    def interrupt(seconds: float) -> None:
        pause(seconds)
        if Path("ready").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        go_through(config, plan_runs(config, ["seed=1,2"], [], folder), [()], None, folder)
    assert Path("saved").exists(), "it is waited until the run has saved"
    assert [entry["exit_code"] for entry in read_record(folder)] == [None, None]


def test_the_table_is_best_first(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("runs/s").absolute()
    losses = {"r=8": [3.0, 2.5, 2.7], "r=16": [3.0, 2.4, 2.9], "r=32": []}
    for name, held_out in losses.items():
        (folder / name).mkdir(parents=True)
        records = [{"step": step, "train/loss": 3.0} for step in range(9)] if held_out else []
        records += [{"step": 3 * at, "eval/loss": loss} for at, loss in enumerate(held_out)]
        (folder / name / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    codes = {"r=8": 0, "r=16": 0, "r=32": 1}
    write_record(folder, [Run([], folder / name, "d", codes[name]) for name in losses])
    assert [(run.name, run.loss, run.step, run.last) for run in outcomes(folder)] == [
        ("r=16", 2.4, 3, 2.9), ("r=8", 2.5, 3, 2.7), ("r=32", None, 0, None),
    ]  # fmt: skip
    assert show_table([str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["1", "r=16", "2.4000", "3", "2.9000", "done"]
    assert lines[3].split() == ["r=32", "-", "0", "-", "ended", "with", "1"]
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert show_table(["elsewhere"]) == 2 and "no sweep.json there" in capsys.readouterr().err
    (folder / "sweep.json").write_text("{")
    assert show_table([str(folder)]) == 2 and "sweep.json: cannot be read" in capsys.readouterr().err
