"""The portable kernels (mma.sync, compute capability 8.0) on whatever card is here, as PTX that the driver compiles."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="needs an NVIDIA GPU of compute capability 8.0 or newer",
    ),
]
PROGRAM = """
import torch
import ops
from ops.builder import LoraOpBuilder
from tests.numerics import cases

LoraOpBuilder(["compute_80"]).load()
ops.load("cuda")
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
for dtype in (torch.float16, torch.bfloat16):
    for T, width, out, rank, p in [
        (300, 512, 384, 16, 0.0), (1000, 1000, 2056, 16, 0.1), (513, 2048, 640, 64, 0.1), (129, 264, 4104, 24, 0.0),
        (4096, 1024, 4096, 128, 0.0), (1, 8, 8, 8, 0.0),
    ]:
        problem = cases.make(T, width, out, rank, dtype, "cuda", p=p)
        truth, budget = cases.truth_and_budget(problem)
        first = cases.run_operator(problem)
        spent = cases.overspent(first, truth, budget)
        assert not spent, (dtype, T, width, out, rank, p, spent)
        again = cases.run_operator(problem)
        assert all(torch.equal(a, b) for a, b in zip(first.named().values(), again.named().values()))
print("portable kernels agree")
"""


def test_mma_sync_kernels_stay_in_the_budget():
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "portable kernels agree" in result.stdout
