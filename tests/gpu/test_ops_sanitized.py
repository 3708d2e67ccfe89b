"""Every kernel once on small ragged shapes, to run under compute-sanitizer (which slows a program 10 to 100 times).


for tool in memcheck racecheck initcheck; do
    compute-sanitizer --tool $tool python -m pytest tests/gpu/test_ops_sanitized.py
done
"""

import pytest
import torch

import ops
from tests.numerics import cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch.cuda.is_available() is False"),
]


@pytest.mark.parametrize(
    ("T", "width", "out", "rank", "dtype", "p"),
    [
        (300, 264, 648, 16, torch.bfloat16, 0.0),
        (300, 264, 648, 16, torch.float16, 0.1),
        (130, 1032, 136, 64, torch.bfloat16, 0.1),
        (130, 136, 1032, 24, torch.bfloat16, 0.0),
        (65, 77, 129, 5, torch.bfloat16, 0.1),
        (65, 77, 129, 20, torch.float32, 0.1),
    ],
)
def test_forward_and_backward(T, width, out, rank, dtype, p):
    ops.load("cuda")
    problem = cases.make(T, width, out, rank, dtype, "cuda", p=p, bias=True)
    truth, budget = cases.truth_and_budget(problem)
    assert not cases.overspent(cases.run_operator(problem), truth, budget)


@pytest.mark.parametrize("count", [(24, 64), (3, 64), (7, 9)])
def test_nf4(count):
    ops.load("cuda")
    rows, cols = count
    packed = torch.randint(0, 256, ((rows * cols + 1) // 2,), dtype=torch.uint8, device="cuda")
    blocks = (rows * cols + 63) // 64
    state = [torch.rand(blocks, device="cuda"), torch.linspace(-1, 1, 16, device="cuda")]
    got = torch.ops.zerolora.dequantize_nf4(packed, state, rows, cols, 64, 1, torch.bfloat16)
    expected = torch.ops.zerolora.dequantize_nf4(
        packed.cpu(), [s.cpu() for s in state], rows, cols, 64, 1, torch.bfloat16
    )
    assert torch.equal(got.cpu(), expected)
