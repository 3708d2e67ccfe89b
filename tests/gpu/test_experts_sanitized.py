"""The experts' kernels once on small ragged shapes, to run under compute-sanitizer as test_ops_sanitized.py says.

torch's own grouped product is left out under initcheck (-k alone), which does not see what the copy engine writes.
"""

import pytest
import torch

import ops
from ops import experts_plain
from tests.numerics import expert_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch.cuda.is_available() is False"),
]


@pytest.mark.parametrize(
    ("T", "H", "inner", "rank", "p", "interleaved"),
    [(130, 264, 72, 16, 0.0, False), (70, 136, 200, 24, 0.2, True), (40, 72, 40, 80, 0.1, False)],
)
def test_forward_and_backward(T, H, inner, rank, p, interleaved):
    ops.load("cuda")
    more = {"p": p, "interleaved": interleaved, "activation": "clamped" if interleaved else "silu", "bias": interleaved}
    problem = expert_cases.make(T, 3, 5, H, inner, rank, torch.bfloat16, **more).to(torch.bfloat16, "cuda")
    y, grads = expert_cases.run(problem)
    true_y, true_grads = expert_cases.truth(problem)
    for name, value in {"y": y, **grads}.items():
        true = {"y": true_y, **true_grads}[name]
        error = (value.double().cpu() - true).square().mean().sqrt()
        assert error <= 0.03 * true.square().mean().sqrt() + 1e-6, name


@pytest.mark.parametrize("routing", ["ragged", "one"])
def test_rows_alone(routing):
    """Sorting, projecting, expanding, the gate and the sums, without a product between them."""
    ops.load("cuda")
    run, E, K, H, inner, rank = torch.ops.zerolora, 5, 3, 136, 72, 16
    generator = torch.Generator().manual_seed(0)
    index = expert_cases.route(routing, 90, K, E, generator)
    N = index.numel()

    def normal(*shape):
        return torch.randn(shape, generator=generator).bfloat16().cuda()

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
    run.expert_gradient(back[1], h, *rows, 0, 16, True, torch.bfloat16, 0.0, None)
    run.expert_expand_(copied, h, normal(E, H, rank), normal(E, H), *rows, 0.1, seed)
    y = run.expert_combine(copied, place, ends, w, K)
    assert torch.isfinite(y).all() and all(torch.isfinite(t).all() for t in back)
