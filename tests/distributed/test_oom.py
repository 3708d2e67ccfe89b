"""One of two ranks runs out of memory in the middle of a backward pass: the run restarts with the same losses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.conftest import ROOT, environment
from tests.tiny import write_run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS, AFTER = 6, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, data and base.yaml."""
    training = {
        "batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "precision": "fp32",
        "save_steps": 2,
    }
    folder = write_run(tmp_path_factory.mktemp("oom"), chats=40, lora={"r": 4, "alpha": 8}, training=training)
    (folder / "config.yaml").rename(folder / "base.yaml")
    return folder


def shortage(folder: Path, **values: int) -> str:
    path = folder / ("-".join(f"{name}{value}" for name, value in values.items()) + ".json")
    path.write_text(json.dumps(values))
    return str(path)


def launch(folder: Path, name: str, *overrides: str, **values: int) -> tuple[int, str]:
    """Exit code and what the user saw."""
    arguments = [shortage(folder, **values), str(folder / name), str(folder / "base.yaml"), *overrides]
    command = [sys.executable, "-m", "tests.distributed.oom_launch", *arguments]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["train/loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[float]:
    """Losses of a run that never runs out of memory."""
    smaller = ["training.batch_size=2", "training.gradient_accumulation_steps=4"]
    code, seen = launch(folder, "whole", "zero.stage=2", *smaller, rank=1, above=2, after=AFTER)
    assert code == 0, seen
    return losses(folder / "whole")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_run_restarts_from_the_newest_checkpoint(whole: list[float], folder: Path, stage: int) -> None:
    name = f"again-{stage}"
    code, seen = launch(folder, name, f"zero.stage={stage}", "training.on_oom=halve", rank=1, above=2, after=AFTER)
    assert code == 0, seen
    assert f"out of memory in step {AFTER + 1}: resuming from checkpoint-2 with batch_size 2, accumulation 4" in seen
    assert losses(folder / name) == pytest.approx(whole, abs=1e-5)
    assert not list((folder / name / "logs").glob("out_of_memory*"))


def test_without_a_checkpoint_it_begins_again(whole: list[float], folder: Path) -> None:
    overrides = ["zero.stage=2", "training.on_oom=halve", "training.save_steps=0"]
    code, seen = launch(folder, "from-the-start", *overrides, rank=0, above=2, after=1)
    assert code == 0, seen
    assert "resuming from the start with batch_size 2" in seen
    assert losses(folder / "from-the-start") == pytest.approx(whole, abs=1e-5)


def test_an_odd_micro_batch_is_cut_so_that_the_global_batch_stays(folder: Path) -> None:
    overrides = ["training.batch_size=3", "training.gradient_accumulation_steps=1", "training.on_oom=halve"]
    code, seen = launch(folder, "odd", "zero.stage=0", *overrides, rank=1, above=2, after=AFTER)
    assert code == 0, seen
    assert "with batch_size 1, accumulation 3" in seen


def test_a_single_row_ends_with_the_fixes(folder: Path) -> None:
    overrides = ["training.batch_size=1", "training.on_oom=halve"]
    code, seen = launch(folder, "one-row", "zero.stage=1", *overrides, rank=0, above=0, after=1)
    assert code == 1
    assert "step 2: out of memory with batch_size 1; use training.gradient_checkpointing=true" in seen


def test_a_run_with_on_oom_stop_says_what_would_help(folder: Path) -> None:
    code, seen = launch(folder, "stops", "zero.stage=2", rank=1, above=2, after=AFTER)
    assert code == 1
    assert "step 4: out of memory with batch_size 4; use training.on_oom=halve" in seen
    assert (folder / "stops" / "checkpoint-2" / "COMPLETE").exists()
