"""The kernels of older cards on whatever card is here, as PTX that the driver compiles.

Of 7.5 plain fused multiply-adds in every type, from 8.0 on mma.sync.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
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
import sys
import torch
import ops
from ops.builder import LoraOpBuilder
from tests.numerics import cases

LoraOpBuilder([sys.argv[1]]).load()
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
print(sys.argv[1], "agrees")
"""


ARCHITECTURES = ("compute_75", "compute_80", "compute_86", "compute_89")
"""7.0 has no compiler in CUDA 13; Hopper's driver compiles nothing newer than its own."""


@pytest.fixture(scope="module")
def running() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All at once: most of the time is nvcc's."""
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    started = {
        name: subprocess.Popen(
            [sys.executable, "-c", PROGRAM, name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        for name in ARCHITECTURES
        if int(name.removeprefix("compute_")) <= 10 * torch.cuda.get_device_capability()[0] + 9
    }
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_kernels_of_older_cards_stay_in_the_budget(running: dict[str, subprocess.Popen[str]], name: str) -> None:
    if name not in running:
        pytest.skip("newer than this card")
    output, _ = running[name].communicate(timeout=500)
    assert running[name].returncode == 0, output[-2000:]
    assert f"{name} agrees" in output
