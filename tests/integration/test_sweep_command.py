"""`zerolora sweep` from end to end: two runs of a tiny model, the table, and a second start that finds them done."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import write_training

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("how", [["--gpus-per-run", "1"], ["--together"]])
def test_two_rates_are_trained_and_compared(tmp_path: Path, how: list[str]) -> None:
    write_training(tmp_path, "val_split: 0.1, ", "max_steps: 4, eval_steps: 2, save_steps: 0")
    command = [sys.executable, "-m", "launcher.cli", "sweep", "c.yaml", "training.learning_rate=1e-5,1e-2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    command += how

    def start() -> "subprocess.CompletedProcess[str]":
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)

    first = start()
    assert first.returncode == 0, first.stderr
    (best, other) = [
        line.split() for line in first.stdout.splitlines() if "learning_rate=1e-" in line and "done" in line
    ]
    assert best[:2] == ["1", "learning_rate=1e-2"] and other[:2] == ["2", "learning_rate=1e-5"]
    assert float(best[2]) < float(other[2]) and (tmp_path / "runs" / "sweep.html").is_file()
    again = start()
    assert again.returncode == 0 and "2 of 2 runs are already finished" in again.stderr


def test_a_setting_that_adapters_share_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("base_model: random:smollm2-135m\noutput_dir: runs\ndataset: {path: c.jsonl}\n")
    command = [sys.executable, "-m", "launcher.cli", "sweep", "c.yaml", "zero.stage=1,2", "--together"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and not (tmp_path / "runs").exists()
    assert "zero.stage=1,2: is shared by all adapters of a joint run; use one value for all runs" in done.stderr
