"""`zerolora sweep`: which runs, where, in which order, what is noted of them, and the table of what came of them."""

import json
import os
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from launcher import sweep as sweep_module
from launcher.commands import main as zerolora
from launcher.submit import expand_sweep
from launcher.sweep import SweepRun, plan_runs, record_runs, split_axes, split_gpus, train_runs
from trainer.config import UserError
from trainer.contract.heartbeat import Heartbeat, HeartbeatFolder
from trainer.contract.json_records import read_sweep
from trainer.monitor.report.sweep_table import main as show_table
from trainer.monitor.report.sweep_table import read_run_results

BEAT = Heartbeat(
    rank=0, host="n0", pid=100, step=4, phase="", collective=None, place=None, collectives_begun=None, idle_s=0.0,
    stuck=False, free_memory_gib=1.0, free_shm_gib=1.0, time=1.0,
)  # fmt: skip

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
        "lora.target_modules=[q_proj],[q_proj,v_proj]",
        "dataset.fields={a: b},{c: d}",
        "dataset.mix=[{path: a},{path: b}]",
    ]
    axes, fixed = split_axes(words)
    assert axes == [words[0], *words[4:7]] and fixed == [*words[1:4], words[7]]
    lines = expand_sweep(words[5:6], Path("/runs"))
    assert shlex.split(lines[1]) == [
        "lora.target_modules=[q_proj,v_proj]",
        "output_dir=/runs/target_modules=q_proj,v_proj",
    ]
    with pytest.raises(UserError, match="must look like key=value,value"):
        split_axes(["lora.r"])


def test_every_combination_has_a_folder_and_is_checked(config: Path) -> None:
    runs = plan_runs(config, ["lora.r=8,16", "seed=1,2"], ["zero.stage=0"], Path("runs/s").absolute())
    assert [run.name for run in runs] == ["r=8,seed=1", "r=8,seed=2", "r=16,seed=1", "r=16,seed=2"]
    assert runs[3].settings[:3] == ["zero.stage=0", "lora.r=16", "seed=2"]
    with pytest.raises(UserError, match=r"lora\.r=0: must be 1 or more \(command line\)"):
        plan_runs(config, ["lora.r=8,0"], [], Path("runs/s"))
    with pytest.raises(UserError, match="1,089 runs: the maximum is 1,000"):
        numbers = ",".join(map(str, range(1, 34)))
        plan_runs(config, [f"lora.r={numbers}", f"seed={numbers}"], [], Path("runs/s"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed=1,2", "seed=3,4"], "seed=3,4: seed is also set by seed=1,2"),
        (["lr=1e-4,2e-4", "training.learning_rate=1e-3,2e-3"], "also set by lr=1e-4,2e-4"),
        (["seed=1,2", "seed=5"], "seed=1,2: seed is also set by seed=5"),
        (["output_dir=a,b"], "output_dir=a,b: a sweep has a single output_dir"),
        (["seed=1,1"], "seed=1,1: has a value twice; list each value once"),
        (["lr=1e-4,0.0001"], "lr=0.0001: has the same settings as lr=1e-4"),
        ([f"seed={','.join(map(str, range(500)))}"] * 9, "also set by"),
        (["dataset.path=a/b.jsonl,a_b.jsonl"], "path=a_b.jsonl: two runs share this folder"),
        (
            ["seed=1,2", "training.resume_from_checkpoint=latest,auto"],
            "every run of a sweep resumes from its own folder",
        ),
    ],
)
def test_runs_that_would_be_the_same_are_refused(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "sweep", "c.yaml", *words, "--dry-run") == 2
    assert message in capsys.readouterr().err
    axes, fixed = split_axes(words)
    options = [word for axis in axes for word in ("--sweep", axis)]
    assert run(monkeypatch, "submit", "c.yaml", *fixed, *options, "--dry-run") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["base_model=a,b", "--together"], "base_model=a,b: is shared by all adapters of a joint run; use one value"),
        (["seed=1,2", "--slurm", "--array", "0-9"], "--array 0-9: the sweep has 2 runs; use 0 to 1"),
        (["seed=1,2", "--slurm", "--array", "0-9", "--dry-run"], "--array 0-9: the sweep has 2 runs; use 0 to 1"),
        (["lora.target_modules=q_proj,v_proj"], "for lists, lora.target_modules=[q_proj],[q_proj,v_proj]"),
    ],
)
def test_a_refused_sweep_writes_nothing(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        assert run(monkeypatch, "sweep", "c.yaml", *words) == 2
    except typer.Exit as end:
        assert end.exit_code == 2
    shown = capfd.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1 and os.listdir() == ["c.yaml"]


@pytest.mark.parametrize("checkpoint", ["other/checkpoint-2", "checkpoint-2"])
def test_a_checkpoint_that_no_run_would_resume_from_is_refused(
    checkpoint: str, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = f"training.resume_from_checkpoint={checkpoint}"
    assert run(monkeypatch, "sweep", "c.yaml", "seed=1,2", resume, "--dry-run") == 2
    assert f"{resume}: every run of a sweep resumes from its own folder" in capsys.readouterr().err


def test_too_many_combinations_are_counted_not_made(config: Path) -> None:
    many = ",".join(map(str, range(1, 1000)))
    names = ("seed", "lora.r", "training.max_steps", "training.save_steps", "training.eval_steps")
    with pytest.raises(UserError, match="the maximum is 1,000"):
        plan_runs(config, [f"{name}={many}" for name in names], [], Path("runs/s"))


def test_gpus_are_split() -> None:
    assert split_gpus([0, 1, 2, 3, 4], 2) == [[0, 1], [2, 3]]
    assert split_gpus([0, 1], None) == split_gpus([], 2) == [()]
    with pytest.raises(UserError, match="--gpus-per-run 3: only 2 GPUs found here"):
        split_gpus([0, 1], 3)
    with pytest.raises(UserError, match="--gpus-per-run 0: must be 1 or more"):
        split_gpus([], 0)


def test_a_dry_run_starts_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "sweep", "c.yaml", "lora.r=8,16", "seed=5", "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("zerolora train c.yaml seed=5 lora.r=8 output_dir=")
    assert lines[0].endswith("/runs/s/r=8 training.resume_from_checkpoint=auto")
    words = ("sweep", "c.yaml", "lora.r=8,16", "--slurm", "--dry-run", "--nodes", "2", "--time", "1:00:00")
    assert run(monkeypatch, *words) == 0
    assert capsys.readouterr().out == "zerolora submit c.yaml --sweep lora.r=8,16 --nodes 2 --time 1:00:00\n"
    assert run(monkeypatch, "sweep", "c.yaml", "seed=5") == 2 and "no values to try" in capsys.readouterr().err
    for option in (["--array", "0-3", "seed=1,2"], ["seed=5", "--array", "0-3"]):
        assert run(monkeypatch, "sweep", "c.yaml", *option) == 2
        assert "--array: not an option of `zerolora sweep`; options of `zerolora submit` need --slurm" in (
            capsys.readouterr().err
        )
    assert run(monkeypatch, "sweep", "c.yaml", "lora.r=8,16", "--nodes", "2") == 2
    assert "--nodes: not an option of `zerolora sweep`; options of `zerolora submit` need" in capsys.readouterr().err
    assert sorted(os.listdir()) == ["c.yaml"]


def program(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are this Python program, its argument being the run's folder."""
    monkeypatch.setattr(
        sweep_module, "build_train_command", lambda config, run, each: [sys.executable, "-c", text, str(run.folder)]
    )


def test_runs_in_parallel_are_recorded(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(
        "import os, pathlib, sys, time\n"
        "run = pathlib.Path(sys.argv[1])\n"
        "(run.parent / f'{run.name}.begun').touch()\n"
        "while len(list(run.parent.glob('*.begun'))) < 2: time.sleep(0.01)\n"  # for ever, if it runs alone
        "print(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "sys.exit(3 if run.name.endswith('2') else 0)",
        monkeypatch,
    )
    folder = Path("runs/s").absolute()
    runs = plan_runs(config, ["seed=1,2,3"], [], folder)
    train_runs(config, runs, [[0], [1]], 1, folder)
    assert [run.exit_code for run in runs] == [0, 3, 0]
    gpus = [(folder / f"seed={seed}.log").read_text().strip() for seed in (1, 2, 3)]
    assert set(gpus[:2]) == {"0", "1"} and gpus[2] in ("0", "1")
    again = plan_runs(config, ["seed=1,2,3"], [], folder)
    assert [run.exit_code for run in again] == [0, None, 0], "what failed is tried again, what is done is not"
    (folder / "seed=1").mkdir()
    with pytest.raises(UserError, match="seed=1: an earlier sweep trained it with other settings"):
        plan_runs(config, ["seed=1,2,3"], ["lora.r=4"], folder)


def end_of_run(folder: Path, *codes: int | None) -> None:
    """What the ranks of a job leave in a run's folder."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    for rank, code in enumerate(codes):
        HeartbeatFolder(folder / "logs", rank, len(codes)).publish(replace(BEAT, rank=rank, exit_code=code))


def test_an_array_skips_finished_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    """Task 0 is done, task 1 was preempted, task 2 lost a rank, task 3 has not begun."""
    folder = Path("runs/s").absolute()
    seeds = "seed=1,2,3,4"
    record_runs(folder, plan_runs(config, [seeds], [], folder))
    for seed, codes in (1, (0, 0)), (2, (75, 75)), (3, (0, None)):
        end_of_run(folder / f"seed={seed}", *codes)

    def array(*options: str) -> str:
        assert run(monkeypatch, "sweep", "c.yaml", seeds, "--slurm", "--dry-run", "--nodes", "2", *options) == 0
        shown = capsys.readouterr()
        assert "1 of 4 runs are already finished" in shown.err
        assert shown.out.startswith("zerolora submit c.yaml --sweep seed=1,2,3,4 --nodes 2 ")
        return shown.out.split()[-1]

    assert array() == "1,2,3"
    assert array("--array", "0-3:2%5") == "0-3:2%5" and array("--array=0,3%1") == "--array=0,3%1"
    for seed in (2, 3, 4):
        end_of_run(folder / f"seed={seed}", 0, 0)
    assert [each.exit_code for each in plan_runs(config, [seeds], [], folder)] == [0] * 4
    assert [each.exit_code for each in plan_runs(config, ["seed=1,9"], [], folder)] == [0, None]
    monkeypatch.setattr(sweep_module, "exec_module", table_instead)
    with pytest.raises(TableShown):
        run(monkeypatch, "sweep", "c.yaml", seeds, "--slurm")
    assert "4 of 4 runs are already finished" in capsys.readouterr().err


class TableShown(Exception):
    """What stands for the process that would become the table."""


def table_instead(module: str, arguments: list[str]) -> None:
    assert module == "trainer.monitor.report.sweep_table" and arguments == [str(Path("runs/s").absolute())]
    raise TableShown


def test_a_signal_is_forwarded_and_the_runs_awaited(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        train_runs(config, plan_runs(config, ["seed=1,2"], [], folder), [()], None, folder)
    assert Path("saved").exists(), "it is waited until the run has saved"
    assert [run.exit_code for run in read_sweep(folder)] == [None, None]


def test_the_table_is_best_first(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("runs/s").absolute()
    losses = {"r=8": [3.0, 2.5, 2.7], "r=16": [3.0, 2.4, 2.9], "r=32": []}
    for name, held_out in losses.items():
        (folder / name).mkdir(parents=True)
        records = [{"step": step, "train/loss": 3.0} for step in range(9)] if held_out else []
        records += [{"step": 3 * at, "eval/loss": loss} for at, loss in enumerate(held_out)]
        (folder / name / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    codes = {"r=8": 0, "r=16": 0, "r=32": 1}
    record_runs(folder, [SweepRun([], folder / name, "d", codes[name]) for name in losses])
    assert [(run.folder.name, run.loss, run.step) for run in read_run_results(folder)] == [
        ("r=16", 2.4, 3), ("r=8", 2.5, 3), ("r=32", None, 0),
    ]  # fmt: skip
    assert show_table([str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["1", "r=16", "2.4000", "3", "done"]
    assert lines[3].split() == ["r=32", "-", "0", "exit", "code", "1"]
    page = (folder / "sweep.html").read_text()
    assert "r=8 · r=16" in page and "r=32" not in page and "<h2>Loss" in page
    assert show_table(["elsewhere"]) == 2 and "elsewhere: has no sweep.json" in capsys.readouterr().err
    (folder / "sweep.json").write_text("{")
    assert show_table([str(folder)]) == 2 and "sweep.json: is not JSON" in capsys.readouterr().err
