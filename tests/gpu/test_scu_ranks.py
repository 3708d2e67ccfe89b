"""Two GPUs under the SCU: lambda is the same to the bit on both, and the run ends where it is not."""

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
from tests.tiny import make_model, write_chats

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs, which meet by NCCL"),
]
STEPS, EVERY, NEVER = 60, 2, 10**6
BACKEND = "nccl"


def run(
    folder: Path, *, stage: int, spoil: int, measure: str = "delta"
) -> "tuple[subprocess.CompletedProcess[str], list[list[str]]]":
    """The end of a run on two ranks, and the lines `step lambda backend` of each."""
    model = make_model(folder / "model")
    write_chats(folder / "train.jsonl", 40)
    config: dict[str, Any] = {
        "base_model": str(model),
        "output_dir": str(folder / "run"),
        "dataset": {"path": str(folder / "train.jsonl"), "max_length": 64, "cache_dir": str(folder / "cache")},
        "training": {"max_steps": STEPS, "batch_size": 2, "learning_rate": 5e-3, "save_steps": 0},
        "zero": {"stage": stage},
        "scu": {"enabled": True, "measure": measure, "target": 1e-4, "check_every": EVERY},
        "logging": {"report_to": "none"},
    }
    if measure == "kl":
        (folder / "reference.jsonl").write_text(
            "".join(json.dumps({"text": f"The {number} trees of the park."}) + "\n" for number in range(100))
        )
        config["scu"] |= {"reference": str(folder / "reference.jsonl")}
    (folder / "c.yaml").write_text(yaml.safe_dump(config))
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*ranks, "-m", "tests.gpu.scu_rank", str(folder), str(spoil), str(folder / "c.yaml")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=400)
    return done, [(folder / f"rank-{rank}.txt").read_text().splitlines() for rank in range(2)]


@pytest.mark.parametrize("measure", ["delta", "kl"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_lambda_is_the_same_to_the_bit_on_both_ranks(tmp_path: Path, stage: int, measure: str) -> None:
    done, (first, second) = run(tmp_path, stage=stage, spoil=NEVER, measure=measure)
    assert done.returncode == 0, done.stdout + done.stderr
    assert first == second and len(first) == STEPS // EVERY
    assert {line.split()[2] for line in first} == {BACKEND}
    assert len({line.split()[1] for line in first}) > 5, "lambda has to move, or its equality says nothing"


def test_a_rank_that_is_off_by_one_bit_ends_the_run(tmp_path: Path) -> None:
    done, (first, second) = run(tmp_path, stage=2, spoil=10)
    assert done.returncode != 0 and first[-1].split()[0] == second[-1].split()[0] == "10"
    assert "step 10: lambda, integral or smoothed S differ between ranks" in done.stdout + done.stderr
