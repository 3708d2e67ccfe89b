"""`zerolora bench` as a user runs it, on CPU ranks: the product, the peers, the profile, the JSON."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import environment

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

COMMAND = [sys.executable, "-m", "launcher.cli", "bench", "--shape", "tiny", "--warmup", "2", "--steps", "3"]
SETTINGS = ["dataset.max_length=128", "training.batch_size=2", "lora.r=4"]


def bench(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    command = [*COMMAND, "--json", str(folder / "out.json"), "--keep", str(folder / "kept"), *arguments, *SETTINGS]
    done = subprocess.run(command, env=environment(), cwd=folder, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "out.json").read_text()), done.stdout


@pytest.mark.nightly
def test_the_product_with_peers_and_its_profile(tmp_path: Path) -> None:
    written, out = bench(tmp_path, "--peer", "peft", "--peer", "deepspeed", "--profile")
    measured = {result["stack"]: result for result in written["results"]}
    assert set(measured) == {"zerolora", "peft", "deepspeed"}
    for result in measured.values():
        assert len(result["step_ms"]) == 3
        assert result["tokens"] == 256
        assert result["tokens_per_second_per_gpu"] == pytest.approx(256e3 / result["median_ms"])
    assert "DeepSpeed + PEFT" in out and "tokens/s/GPU" in out
    assert written["header"]["shape"] == "random:tiny"
    assert written["header"]["versions"]["deepspeed"]

    # Everything that costs time was on: the run is one of `zerolora train`, with its records.
    run = tmp_path / "kept" / "as-configured" / "run"
    record = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert "scu/lambda" in record
    assert list(run.glob("tensorboard/**/events.*"))
    assert (run / "adapter_model.safetensors").exists()

    profile = written["profiles"]["as configured"]
    assert sum(profile["by_category_ms"].values()) == pytest.approx(profile["step_ms"])
    for category in ("frozen products", "adapter", "attention", "SCU", "engine, optimizer"):
        assert profile["by_category_ms"][category] > 0, category
    assert profile["floor_ms"]["frozen products"] > 0
    assert "gap ms" in out


@pytest.mark.nightly
def test_several_ranks_of_a_partitioned_4_bit_base(tmp_path: Path) -> None:
    """Random weights are drawn, quantised and partitioned without a file."""
    written, _ = bench(tmp_path, "--num-gpus", "2", "--peer", "peft", "adapter=qlora", "zero.stage=3")
    product, other = written["results"]
    assert len(product["step_ms"]) == 3
    assert product["tokens"] == 256
    assert other["note"] == "measured on one GPU only"


def test_what_was_measured_is_shown_although_something_failed(tmp_path: Path) -> None:
    """A setting that only the look at the model refuses."""
    command = [*COMMAND, "--keep", str(tmp_path / "kept"), *SETTINGS, "lora.target_modules=q_projection"]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=580)
    assert done.returncode == 1
    assert "zerolora failed with exit code 2: error: lora.target_modules=q_projection: matches no layer" in done.stdout
