"""Short runs of a tiny model on two ranks that start again: on CPUs (integration) and on GPUs (gpu)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.chaos.places import Local
from tests.ends import MISCHIEF, TRAIN
from tests.tiny import write_run
from trainer.contract.restart_record import read_restarts

STEPS = 12


def write_short_run(folder: Path) -> Path:
    """A model, chats and config.yaml; returns the folder."""
    training = {"batch_size": 2, "max_steps": STEPS, "save_steps": 4}
    return write_run(folder, chats=40, lora={"r": 4, "dropout": 0.1}, training=training)


def train(
    workplace: Path, name: str, mischief: str = "", *settings: str, once: bool = True, place: Local | None = None
) -> tuple[int, str]:
    """Exit code, and what the user saw."""
    env = (place or Local()).environment()
    if mischief:
        env |= {"ZEROLORA_MISCHIEF": mischief, "PYTHONPATH": os.pathsep.join([str(MISCHIEF), env["PYTHONPATH"]])}
        env |= {"ZEROLORA_MISCHIEF_ONCE": str(workplace / f"{name}-happened") if once else ""}
    command = [*TRAIN, str(workplace / "config.yaml"), f"output_dir={workplace / name}", *settings]
    done = subprocess.run(command, env=env, cwd=workplace, capture_output=True, text=True, timeout=400)
    return done.returncode, done.stdout + done.stderr


def adapter(run: Path) -> bytes:
    """The bytes of the trained factors."""
    stored = load_file(run / "adapter_model.safetensors")
    return b"".join(value.numpy().tobytes() for _, value in sorted(stored.items()))


def records(run: Path) -> list[dict[str, float]]:
    """The metrics of every step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


def losses(run: Path) -> list[float]:
    """Of every step, nats per target token."""
    return [record["train/loss"] for record in records(run)]


def lose_one_and_come_back(workplace: Path, left_out: str, place: Local | None = None) -> None:
    """Act as a host that lost its card: the other one takes its part of the global batch until both are back."""
    same = ["lora.dropout=0", "training.precision=fp32", "training.lr_scheduler=constant"]  # ranks draw masks
    code, seen = train(workplace, "both", "", *same, place=place)
    assert code == 0, seen
    elastic = [*same, "training.elastic=true"]
    code, seen = train(workplace, "one", "1:lose:15", *elastic, "training.max_steps=10", place=place)
    assert code == 0, seen
    assert f"{left_out} is excluded: it failed again before completing a step" in seen, seen
    assert "continuing with 1 of 2 ranks; to use all 2 again, stop the run and start it with" in seen
    assert [restart.ranks for restart in read_restarts(workplace / "one")] == [2, 2]
    assert json.loads((workplace / "one" / "run.json").read_text())["world_size"] == 1
    code, seen = train(workplace, "one", "", *elastic, "training.resume_from_checkpoint=auto", place=place)
    assert code == 0 and "resumed from" in seen, seen
    assert json.loads((workplace / "one" / "run.json").read_text())["world_size"] == 2
    assert losses(workplace / "one") == pytest.approx(losses(workplace / "both"), abs=1e-5)


def inspected(run: Path, step: int) -> list[str]:
    """The samples that `zerolora inspect` shows of a step."""
    command = [sys.executable, "-m", "launcher.module", "trainer.commands.inspect", str(run / "training_config.json")]
    done = subprocess.run([*command, "--step", str(step), "--ranks", "2"], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line.startswith("sample ")]


def fail_twice_for_a_nan(workplace: Path, others: str = "", place: Local | None = None) -> None:
    """Rank 1's loss is NaN in step 5, again after the start; `others` are more mischiefs."""
    mischief = ";".join(filter(None, ["1:nan@loss:5", others]))
    code, seen = train(workplace, "nan", mischief, "training.save_steps=0", once=False, place=place)
    assert code == 1, seen
    assert seen.count("the run failed: rank 1 on ") == 2 and "exit code 1 (step 5" in seen, seen
    assert "step 5: the loss or a gradient is not finite" in seen
    assert "step 5: rank 1 had a non-finite loss" in (workplace / "nan" / "logs" / "rank-0.log").read_text()
    assert "step 5 failed twice in the same way" in seen
    assert len(inspected(workplace / "nan", 5)) == 4
