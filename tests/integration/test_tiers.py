"""`zerolora tier` from the command line to its verdict, on the CPU and a tiny shape."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[2]


def tier(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "launcher.cli", "tier", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_a_tier_runs_and_asserts_on_what_the_run_left(tmp_path: Path) -> None:
    result = tier(tmp_path, "quick", "--cpu", "--base-model", "random:tiny", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    [quick] = document["tiers"]
    verdicts = {check["name"]: check["passed"] for check in quick["checks"]}
    assert verdicts == {"time": None, "finite": True, "adapters": True, "peak memory": None}
    assert "on the CPU: about 0 h 01 min" in result.stderr
    assert (tmp_path / "runs" / "tiers" / "quick" / "adapter_model.safetensors").is_file()


def test_a_run_that_fails_is_a_tier_that_failed(tmp_path: Path) -> None:
    (tmp_path / "models" / "SmolLM2-135M-Instruct").mkdir(parents=True)
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    (tmp_path / "models" / "SmolLM2-135M-Instruct" / "config.json").write_text(json.dumps(config))
    result = tier(tmp_path, "quick", "--cpu", "--models", "models")
    assert result.returncode == 1
    assert "no .safetensors file" in result.stdout, "the last lines of the run are shown"
    assert "zerolora train ended with exit code 2" in result.stdout and "0 of 1 tiers passed" in result.stdout
