"""The experts' kernels once on small ragged shapes, to run under compute-sanitizer as test_ops_sanitized.py says.

torch's own grouped product is left out under initcheck (-k alone), which does not see what the copy engine writes.
"""

from dataclasses import replace

import pytest
import torch

import ops
from ops import experts_kernels, experts_plain
from tests.numerics import expert_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch.cuda.is_available() is False"),
]


@pytest.mark.parametrize(
    ("T", "H", "inner", "rank", "p", "interleaved", "dtype"),
    [
        (130, 264, 72, 16, 0.0, False, torch.bfloat16),
        (70, 136, 200, 24, 0.2, True, torch.bfloat16),
        (40, 72, 40, 80, 0.1, False, torch.bfloat16),
        (130, 264, 72, 16, 0.1, False, torch.float16),
        (70, 136, 200, 24, 0.0, True, torch.float16),
    ],
)
def test_forward_and_backward(T, H, inner, rank, p, interleaved, dtype):
    ops.load_backend("cuda")
    more = {"p": p, "interleaved": interleaved, "activation": "clamped" if interleaved else "silu", "bias": interleaved}
    # Rounding moves few values across a limit this far out, where the derivative changes.
    check(expert_cases.make(T, 3, 5, H, inner, rank, dtype, **more, limit=8.0).to(dtype, "cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("storage", ["nf4", "nested", "mxfp4"])
def test_packed_experts(storage, dtype):
    """Dequantised for the products of both directions."""
    ops.load_backend("cuda")
    E, H, inner, generator = 5, 288, 96, torch.Generator().manual_seed(0)
    shapes = (E, 2 * inner, H), (E, H, inner)
    gate_up, down = (expert_cases.draw_packed(storage, shape, generator) for shape in shapes)
    problem = replace(
        expert_cases.make(90, 3, E, H, inner, 16, dtype, bias=True),
        gate_up=gate_up.dequantize(dtype),
        down=down.dequantize(dtype),
    ).to(dtype, "cuda")
    on_card = [expert_cases.moved(matrix, "cuda") for matrix in (gate_up, down)]
    check(problem, replace(problem.frozen(), gate_up=on_card[0], down=on_card[1]))


def check(problem, frozen=None):
    y, grads = expert_cases.run(problem, frozen)
    true_y, true_grads = expert_cases.truth(problem)
    for name, value in {"y": y, **grads}.items():
        true = {"y": true_y, **true_grads}[name]
        error = (value.double().cpu() - true).square().mean().sqrt()
        assert error <= 0.03 * true.square().mean().sqrt() + 1e-6, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("storage", "rows", "cols"), [("nf4", 72, 136), ("nested", 72, 136), ("nested", 8, 8), ("mxfp4", 72, 96)]
)
def test_dequantising_alone(storage, rows, cols, dtype):
    """To the bit; no matrix fills the last block of threads."""
    ops.load_backend("cuda")
    matrix = expert_cases.draw_packed(storage, (3, rows, cols), torch.Generator().manual_seed(0))
    on_card, shape = expert_cases.moved(matrix, "cuda"), [3, rows, cols, matrix.block, matrix.nested_block]
    here = experts_kernels.build_dense_weight(on_card.tensors, matrix.storage, shape, dtype)
    assert torch.equal(here.cpu(), matrix.dequantize(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("routing", ["ragged", "one"])
def test_rows_alone(routing, dtype):
    """Sorting, projecting, expanding, the gate and the sums, without a product between them."""
    ops.load_backend("cuda")
    run, E, K, H, inner, rank = torch.ops.zerolora, 5, 3, 136, 72, 16
    generator = torch.Generator().manual_seed(0)
    index = expert_cases.route(routing, 90, K, E, generator)
    N = index.numel()

    def normal(*shape):
        return (torch.randn(shape, generator=generator) / 5).to(dtype).cuda()  # sums that fp16 holds

    order, ends = run.expert_sort(index.cuda(), E)
    assert all(map(torch.equal, (order.cpu(), ends.cpu()), experts_plain.sort_rows(index, E)))
    place, tiles, _ = run.expert_plan(order, ends)
    rows, seed = (order, ends, tiles), torch.tensor([77]).cuda()
    h, copied = run.expert_project(normal(90, H), *rows, K, normal(E, rank, H), 1.5, True, 0.1, seed)
    u0, b = normal(N, 2 * inner), normal(E, 2 * inner, rank)
    gate = u0, h, b, normal(E, 2 * inner), *rows, 0, False, 1.0, 1.0
    act, h_d = run.expert_gate(*gate[:4], *gate[4:], normal(E, rank, inner), 0.5, 0.1, seed)
    w = torch.rand(N, generator=generator).cuda()
    back = run.expert_gate_backward(
        act, *gate[:4], h_d, normal(E, inner, rank), w, *gate[4:], normal(E, rank, 2 * inner), 0.5, 0.1, seed
    )
    run.expert_gradient(back[0], h_d, *rows, 0, 13, False, torch.float32, 0.1, seed)
    run.expert_gradient(back[1], h, *rows, 0, 16, True, dtype, 0.0, None)
    run.expert_expand_(copied, h, normal(E, H, rank), normal(E, H), *rows, 0.1, seed)
    y = run.expert_combine(copied, place, ends, w, K)
    assert torch.isfinite(y).all() and all(torch.isfinite(t).all() for t in back)
