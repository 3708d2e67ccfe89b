"""The operator of several adapters against the one of a single adapter, adapter by adapter."""

import pytest
import torch
from torch import Tensor

from ops.lora import lora_group
from ops.many_adapters import Bundle, add_adapters, begin_frozen_matmuls

IN, OUTS = 24, (16, 40)
CASES = {
    "equal": [(3, 5, 4, 2.0, 0.0)],
    "ragged": [(1, 5, 4, 2.0, 0.0), (1, 3, 4, 2.0, 0.0), (2, 1, 2, 0.5, 0.0)],
    "gap": [(1, 5, 4, 2.0, 0.0), (1, 5, 0, 2.0, 0.0), (2, 5, 4, 2.0, 0.0)],
    "dropout": [(1, 5, 4, 2.0, 0.3), (1, 5, 4, 2.0, 0.3), (1, 2, 8, 1.0, 0.0)],
}
"""(adapters, tokens of each, rank, scale, dropout) of the bundles; rank 0: adapters without these layers."""


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("case", CASES)
def test_each_part_is_that_of_its_adapter_alone(case: str) -> None:
    torch.manual_seed(0)
    x = draw(sum(count * tokens for count, tokens, *_ in CASES[case]), IN)
    weights = [torch.randn(out, IN, dtype=torch.float64) for out in OUTS]
    bundles, alone, start = [], [], 0
    downs: list[Tensor] = []
    ups: list[Tensor] = []
    for count, tokens, rank, scale, dropout in CASES[case]:
        end = start + count * tokens
        rows = x[start:end].split(tokens)
        if not rank:
            alone += [[part @ weight.t() for weight in weights] for part in rows]
            start = end
            continue
        own = [draw(count, rank, IN) for _ in OUTS], [draw(count, out, rank) for out in OUTS]
        with torch.random.fork_rng():
            seed = torch.randint(0, 2**62, (1,)) if dropout else None
            bundles.append(Bundle(start, end, count, (0, 1), (scale,) * 2, dropout, seed))
        with torch.random.fork_rng():  # draws the same seed
            for number, part in enumerate(rows):
                down, up = ([each[number] for each in side] for side in own)
                alone.append(lora_group(part, weights, [], down, up, [scale] * 2, dropout))
        torch.rand(1)
        downs, ups, start = downs + own[0], ups + own[1], end
    entered, pending = begin_frozen_matmuls(x)
    frozen = [entered @ weight.t() for weight in weights]
    found = add_adapters(x, frozen, bundles, downs, ups, pending)
    expected = [torch.cat([outputs[layer] for outputs in alone]) for layer in range(2)]
    leaves = [x, *downs, *ups]
    grads = [torch.randn_like(each) for each in expected]
    for ours, theirs in (
        (found, expected),
        (torch.autograd.grad(found, leaves, grads), torch.autograd.grad(expected, leaves, grads)),
    ):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_nan_stays_in_the_rows_and_factors_of_its_adapter() -> None:
    torch.manual_seed(0)
    x, weight = draw(6, IN), torch.zeros(16, IN, dtype=torch.float64)
    down, up = draw(2, 4, IN), draw(2, 16, 4)
    with torch.no_grad():
        x[0, 0] = torch.nan
    entered, pending = begin_frozen_matmuls(x)
    [found] = add_adapters(x, [entered @ weight.t()], [Bundle(0, 6, 2, (0,), (1.0,))], [down], [up], pending)
    grad_x, grad_down, grad_up = torch.autograd.grad(found.sum(), [x, down, up])
    assert found[0].isnan().all() and found[3:].isfinite().all()
    assert grad_down[0].isnan().any() and grad_up[0].isnan().any()
    assert grad_down[1].isfinite().all() and grad_up[1].isfinite().all() and grad_x[3:].isfinite().all()
