"""The Shannon Control Unit in whole runs: what evaluation leaves alone, resuming, and what stops a run."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from tests.distributed.conftest import environment
from tests.tiny import make_model, write_chats

STEPS, CUT = 8, 4
# The trainer with a controller that is handed a sum of losses which is no number in step 3; the loss itself is sound.
POISONED = """
import sys
from trainer.scu import controller
from trainer.train import main

observe = controller.ScuController.observe


def poisoned(self, step, loss_sum_global, *others):
    observe(self, step, loss_sum_global * (float("nan") if step == 3 else 1.0), *others)


controller.ScuController.observe = poisoned
sys.exit(main())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scu")
    make_model(folder / "model")
    write_chats(folder / "train.jsonl", 40)
    write_chats(folder / "eval.jsonl", 11, seed=9)
    training = {"max_steps": STEPS, "batch_size": 4, "learning_rate": 1e-2, "save_steps": CUT, "eval_steps": 0}
    settings = {
        "base_model": str(folder / "model"),
        "output_dir": str(folder / "whole"),
        "lora": {"r": 4},
        "dataset": {"path": str(folder / "train.jsonl"), "max_length": 96, "cache_dir": str(folder / "cache")},
        "training": training,
        "scu": {"enabled": True, "sigma": 0.1, "target": 0.02, "deadband": 0.0, "kp": 2.0, "ki": 0.1},
        "logging": {"report_to": "none"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


def train(folder: Path, *overrides: str, program: tuple[str, ...] = ("-m", "trainer.train")) -> Any:
    command = [sys.executable, *program, str(folder / "config.yaml"), *overrides]
    return subprocess.run(command, env=environment(), cwd=folder, capture_output=True, text=True, timeout=600)


def read_records(run: Path) -> dict[int, dict[str, float]]:
    """Step -> what the controller measured and did; JSON keeps every bit of a double."""
    return {record["step"]: record for record in json.loads((run / "scu_metrics.json").read_text())}


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[int, dict[str, float]]:
    result = train(folder)
    assert result.returncode == 0, result.stdout + result.stderr
    found = read_records(folder / "whole")
    assert [*found] == [*range(1, STEPS + 1)]
    lambdas = [record["lambda"] for record in found.values()]
    held = lambdas.count(lambdas[0])  # until S first reaches the target
    assert held <= CUT and len(set(lambdas)) == STEPS - held + 1, "a lambda that rests shows nothing"
    return found


def test_evaluation_leaves_the_controller_untouched(folder: Path, whole: dict[int, dict[str, float]]) -> None:
    run = folder / "evaluated"
    held_out = (f"dataset.evaluation.path={folder}/eval.jsonl", "training.eval_steps=1")
    result = train(folder, *held_out, f"output_dir={run}")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum("eval/loss" in line for line in lines) == STEPS + 1
    assert read_records(run) == whole


def test_a_resumed_run_has_the_lambdas_of_the_uninterrupted_one(folder: Path, whole: dict[int, Any]) -> None:
    """The checkpoint holds the measurement of its last step, which steers the first step after it."""
    run = folder / "resumed"
    checkpoint = folder / "whole" / f"checkpoint-{CUT}"
    result = train(folder, f"output_dir={run}", f"training.resume_from_checkpoint={checkpoint}")
    assert result.returncode == 0, result.stdout + result.stderr
    assert read_records(run) == {step: record for step, record in whole.items() if step >= CUT}


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_param_bpt_is_that_of_the_saved_adapter(folder: Path, whole: dict[int, Any], adapter: str) -> None:
    """The weights of a checkpoint are those that the next step measures; a 4-bit base changes nothing in that."""
    run = folder / ("whole" if adapter == "lora" else adapter)
    if adapter == "qlora":
        result = train(folder, f"output_dir={run}", "adapter=qlora", f"training.max_steps={CUT + 1}")
        assert result.returncode == 0, result.stdout + result.stderr
    checkpoint, config = run / f"checkpoint-{CUT}", json.loads((run / "scu_config.json").read_text())
    lora = json.loads((checkpoint / "adapter_config.json").read_text())
    weights = load_file(checkpoint / "adapter_model.safetensors")
    pairs = [(weights[name.replace("lora_A", "lora_B")], a) for name, a in weights.items() if "lora_A" in name]
    assert len(pairs) == 14, "seven linear layers in each of two blocks"
    squares = sum(((lora["lora_alpha"] / lora["r"]) * (b @ a)).double().square().sum().item() for b, a in pairs)
    expected = squares / (2 * config["sigma"] ** 2 * config["tokens"] * math.log(2))
    assert read_records(run)[CUT + 1]["param_bpt"] == pytest.approx(expected, rel=1e-4)


def test_a_fault_inside_the_controller_stops_the_run(folder: Path) -> None:
    result = train(folder, f"output_dir={folder}/poisoned", program=("-c", POISONED))
    assert result.returncode == 1, result.stdout + result.stderr
    assert "scu: step 3 has a loss sum of nan" in result.stdout + result.stderr
    assert not (folder / "poisoned" / "adapter_model.safetensors").exists()


def test_a_target_out_of_reach_is_refused_before_training(folder: Path) -> None:
    run = folder / "unreachable"
    result = train(folder, f"output_dir={run}", "scu.target=0.9", "scu.sigma=1e6")
    assert result.returncode == 2, result.stdout + result.stderr
    shown = result.stdout + result.stderr
    assert "scu.target=0.9: out of reach" in shown and "keep it within [0, " in shown
    assert not (run / "metrics.jsonl").exists() and not (run / "run.json").exists()
