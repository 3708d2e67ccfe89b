"""The operator of several adapters against the one of a single adapter, part by part."""

import pytest
import torch
from torch import Tensor

from ops.lora import lora_group
from ops.many_adapters import Part, add_adapters

IN, OUTS = 24, (16, 40)
CASES = {
    "equal": [(5, 4, 2.0, 0.0), (5, 4, 2.0, 0.0), (5, 4, 2.0, 0.0)],
    "ragged": [(5, 4, 2.0, 0.0), (3, 4, 2.0, 0.0), (1, 2, 0.5, 0.0), (1, 2, 0.5, 0.0)],
    "gap": [(5, 4, 2.0, 0.0), (5, 0, 2.0, 0.0), (5, 4, 2.0, 0.0), (5, 4, 2.0, 0.0)],
    "dropout": [(5, 4, 2.0, 0.3), (5, 4, 2.0, 0.3), (2, 8, 1.0, 0.0)],
}


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("case", CASES)
def test_each_part_is_that_of_its_adapter_alone(case: str) -> None:
    torch.manual_seed(0)
    tokens = sum(count for count, *_ in CASES[case])
    x, weights = draw(tokens, IN), [torch.randn(out, IN, dtype=torch.float64) for out in OUTS]
    parts, alone, start = [], [], 0
    downs: list[Tensor] = []
    ups: list[Tensor] = []
    for count, rank, scale, dropout in CASES[case]:
        rows = x[start : start + count]
        if not rank:  # an adapter without these layers
            alone.append([rows @ weight.t() for weight in weights])
            start += count
            continue
        own = [draw(rank, IN) for _ in OUTS], [draw(out, rank) for out in OUTS]
        with torch.random.fork_rng():
            seed = torch.randint(0, 2**62, (1,)) if dropout else None
            parts.append(Part(start, start + count, (0, 1), (scale,) * 2, (rank,) * 2, dropout, seed))
        with torch.random.fork_rng():  # draws the same seed
            alone.append(lora_group(rows, weights, [], *own, [scale] * 2, dropout))
        torch.rand(1)
        downs, ups = downs + own[0], ups + own[1]
        start += count
    frozen = [x @ weight.t() for weight in weights]
    found = add_adapters(x, frozen, parts, downs, ups)
    expected = [torch.cat([outputs[layer] for outputs in alone]) for layer in range(2)]
    leaves = [x, *downs, *ups]
    grads = [torch.randn_like(each) for each in expected]
    for ours, theirs in (
        (found, expected),
        (torch.autograd.grad(found, leaves, grads), torch.autograd.grad(expected, leaves, grads)),
    ):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_nan_stays_in_the_rows_and_factors_of_its_part() -> None:
    torch.manual_seed(0)
    x, y = draw(6, IN), torch.zeros(6, 16, dtype=torch.float64, requires_grad=True) * 1.0
    downs, ups = [draw(4, IN), draw(4, IN)], [draw(16, 4), draw(16, 4)]
    with torch.no_grad():
        x[0, 0] = torch.nan
    parts = [Part(0, 3, (0,), (1.0,), (4,)), Part(3, 6, (0,), (1.0,), (4,))]
    [found] = add_adapters(x, [y], parts, downs, ups)
    grad_x, down, other_down, up, other_up = torch.autograd.grad(found.sum(), [x, *downs, *ups])
    assert found[0].isnan().all() and found[3:].isfinite().all()
    assert down.isnan().any() and up.isnan().any()
    assert other_down.isfinite().all() and other_up.isfinite().all() and grad_x[3:].isfinite().all()
