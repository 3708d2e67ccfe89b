"""A real GPU that is too small: `training.memory_fraction` leaves room for 8 rows, and the run asks for 32."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.distributed.conftest import ROOT
from tests.gpu.memory_table import ALLOWED, write_text

pytestmark = pytest.mark.gpu

LENGTH, ROWS, FIT, STEPS = 512, 32, 8, 4
MODEL = "random:smollm2-135m,num_hidden_layers=8"


def train(folder: Path, name: str, **overrides: Any) -> tuple[int, str]:
    """`zerolora train` on all GPUs; exit code and what the user saw."""
    settings = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in overrides.items()]
    command = [sys.executable, "-m", "launcher.cli", "train", str(folder / "base.yaml"), f"output_dir={folder / name}"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    env.pop("DS_ACCELERATOR", None)
    done = subprocess.run([*command, *settings], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("oom-gpu")
    write_text(folder / "text.jsonl", LENGTH)
    base = {
        "base_model": MODEL,
        "output_dir": "unset",
        "dataset": {"path": str(folder / "text.jsonl"), "max_length": LENGTH, "cache_dir": str(folder / "cache")},
        "training": {
            "batch_size": ROWS,
            "gradient_accumulation_steps": 1,
            "max_steps": STEPS,
            "precision": "fp32",
            "save_steps": 2,
            "learning_rate": 1e-3,
            "warmup_ratio": 0.0,
        },
        "logging": {"report_to": "none"},
    }
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[float]:
    code, seen = train(folder, "whole", training__batch_size=FIT, training__gradient_accumulation_steps=ROWS // FIT)
    assert code == 0, seen
    return losses(folder / "whole")


@pytest.fixture(scope="module")
def fraction(folder: Path) -> float:
    """A quarter more than the estimate for 8 rows, which is less than 16 need."""
    from trainer.commands.estimate import build_planner
    from trainer.config import load_config
    from trainer.memory.planner import apply_changes

    config = load_config(folder / "base.yaml").config
    planner, _ = build_planner(config, torch.cuda.device_count())
    room = 1.25 * planner.estimate(apply_changes(config, {"training.batch_size": FIT})).peak
    assert planner.estimate(apply_changes(config, {"training.batch_size": 2 * FIT})).peak > 1.2 * room
    return room / torch.cuda.get_device_properties(0).total_memory


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gpu_that_is_too_small_trains_to_the_same_losses(
    folder: Path, whole: list[float], fraction: float, stage: int
) -> None:
    settings = {"training__memory_fraction": fraction, "training__ignore_memory_check": True, "zero__stage": stage}
    code, seen = train(folder, f"stage-{stage}", training__on_oom="halve", **settings)
    assert code == 0, seen
    assert seen.count("out of memory") >= 2 and f"batch_size {FIT}, accumulation {ROWS // FIT}" in seen
    assert losses(folder / f"stage-{stage}") == pytest.approx(whole, rel=1e-4)


def test_the_check_before_training_names_three_changes(folder: Path, fraction: float) -> None:
    code, seen = train(folder, "refused", training__memory_fraction=fraction)
    assert code == 2
    line = next(line for line in seen.splitlines() if line.startswith("error: memory:"))
    assert "training.batch_size=" in line and line.count("GiB)") >= 3
    assert not (folder / "refused" / "metrics.jsonl").exists()


def test_segments_grow() -> None:
    code = (
        "import trainer.parallel.ranks.training_process, torch; x = torch.ones(9).cuda(); "
        "print(torch.cuda.memory_snapshot())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "'is_expandable': True" in done.stdout and "'is_expandable': False" not in done.stdout


def test_auto_takes_a_micro_batch_that_fits(folder: Path, fraction: float) -> None:
    settings = {"training__batch_size": "auto", "zero__stage": "auto", "training__memory_fraction": fraction}
    code, seen = train(folder, "auto", **settings)
    assert code == 0, seen
    record = json.loads((folder / "auto" / "run.json").read_text())["memory"]
    config = json.loads((folder / "auto" / "training_config.json").read_text())
    assert FIT <= config["training"]["batch_size"] < 2 * FIT
    assert record["measured_bytes"] < fraction * torch.cuda.get_device_properties(0).total_memory
    low, high = ALLOWED
    assert low < record["predicted"]["peak_bytes"] / record["measured_bytes"] < high
