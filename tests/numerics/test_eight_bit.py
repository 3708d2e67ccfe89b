"""The operators on an 8-bit base by their definition on the CPU: budgets, odd rows, groups, opcheck, mutations."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ops
from ops import eight_bit, lora, reference
from ops.eight_bit import STORAGE
from tests.numerics import cases, eight_bit_cases

KINDS = eight_bit_cases.KINDS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "p"), [(torch.float32, 0.0), (torch.float32, 0.1), (torch.bfloat16, 0.0)], ids=lambda value: str(value)
)
@pytest.mark.parametrize(("T", "width", "out"), [(50, 96, 64), (1, 8, 8), (33, 77, 129)])
def test_errors_stay_in_the_budget(kind: str, dtype: torch.dtype, p: float, T: int, width: int, out: int) -> None:
    eight_bit_cases.check(eight_bit_cases.make(kind, T, width, out, 4, dtype=dtype, p=p, bias=width == 96))


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens(kind: str) -> None:
    results = eight_bit_cases.run_operator(eight_bit_cases.make(kind, 0, 32, 16, 4))
    assert results.y.shape == (0, 16) and results.grad_x.shape == (0, 32)
    assert not results.grad_down.any() and not results.grad_up.any()


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_rows(kind: str) -> None:
    """The largest magnitude is hit; zeros stay zeros; the rounding error is that of the format; NaN and inf show."""
    top = 448.0 if kind == "fp8" else 127.0
    torch.manual_seed(0)
    rows = torch.randn(6, 64)
    rows[1] = 0.0
    rows[2, 3] = 1e30  # one huge value
    rows[3] *= 1e-36
    values, scale = eight_bit.quantize_rows(rows, kind)
    back = eight_bit_cases.dequantize_rows(values, scale)
    assert torch.equal(back[1], torch.zeros(64))
    assert torch.equal(back[3], torch.zeros(64))  # below what a scale may be
    torch.testing.assert_close(back[2, 3], rows[2, 3], rtol=1e-6, atol=0.0)
    for row in (0, 4, 5):
        largest = rows[row].abs().max()
        assert scale[row] == largest / top
        assert reference.decode_8bit_values(values[row]).abs().max() == top
        step = rows[row].abs() / 16 + largest / top * 2.0**-10 if kind == "fp8" else largest / 254 * 1.0001
        assert ((back[row] - rows[row]).abs() <= step).all()
    for bad in (math.nan, math.inf):
        broken = rows.clone()
        broken[4, 7] = bad
        weight = ops.EightBitWeight(*eight_bit.quantize_rows(torch.randn(16, 64), kind))
        y = ops.eight_bit_linear(broken, weight, None)
        assert y[4].isnan().all() and y[[0, 1, 2, 3, 5]].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_shares_one_quantised_gradient(kind: str) -> None:
    """Forward as each alone; dX as the product of all gradients side by side with all weights one above the other."""
    torch.manual_seed(0)
    x = torch.randn(2, 9, 32, requires_grad=True)
    weights = [ops.EightBitWeight(*eight_bit.quantize_rows(torch.randn(out, 32), kind)) for out in (16, 8)]
    downs = [torch.randn(4, 32, requires_grad=True) for _ in weights]
    ups = [torch.zeros(out, 4, requires_grad=True) for out in (16, 8)]
    ys = ops.eight_bit_group(x, weights, [None, torch.ones(8)], downs, ups, [1.0, 2.0])
    alone = [ops.eight_bit_linear(x, weights[0], None), ops.eight_bit_linear(x, weights[1], torch.ones(8))]
    for found, wanted in zip(ys, alone, strict=True):
        torch.testing.assert_close(found, wanted)
    grads = [torch.randn_like(y) for y in ys]
    (grad_x,) = torch.autograd.grad(ys, x, grads)
    together = torch.ops.zerolora.eight_bit_linear_backward(
        grads, [weight.values for weight in weights], [weight.row_scale for weight in weights]
    )
    torch.testing.assert_close(grad_x, together)  # B is 0
    exact = torch.zeros_like(x)
    for grad, weight in zip(grads, weights, strict=True):
        exact += grad @ eight_bit_cases.dequantize_rows(weight.values, weight.row_scale)
    assert cases.rms(grad_x, exact) <= (0.05 if kind == "fp8" else 0.02) * float(exact.square().mean().sqrt())


def test_the_gradients_of_the_adapter_are_those_of_a_plain_base() -> None:
    problem = eight_bit_cases.make("fp8", 40, 64, 48, 8, p=0.1)
    ours, plain = eight_bit_cases.run_operator(problem), cases.run_operator(problem.plain)
    assert torch.equal(ours.grad_up, plain.grad_up) and torch.equal(ours.grad_down, plain.grad_down)


product = reference.compute_8bit_product
MUTATIONS: dict[str, Callable[..., Tensor]] = {
    "no scale of the tokens": lambda q, scale, right, column: product(q, torch.ones_like(scale), right, column),
    "no scale of the weight's rows": lambda q, scale, right, column: product(q, scale, right, None),
    "the last terms left out": lambda q, scale, right, column: product(q[:, :-2], scale, right[:-2], column),
    "e4m3 read as whole numbers": lambda q, scale, right, column: product(q.view(torch.int8), scale, right, column),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_leave_the_budget(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = eight_bit_cases.make("fp8", 50, 96, 64, 4)
    truth, budget = eight_bit_cases.truth_and_budget(problem)
    monkeypatch.setattr(reference, "compute_8bit_product", MUTATIONS[name])
    assert "y" in cases.overspent(eight_bit_cases.run_operator(problem), truth, budget)


def test_the_scale_of_the_weight_is_in_the_gradient_before_it_is_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = eight_bit_cases.make("fp8", 50, 96, 64, 4)
    truth, budget = eight_bit_cases.truth_and_budget(problem)
    plain = eight_bit.reference_quantize_rows
    monkeypatch.setattr(eight_bit, "reference_quantize_rows", lambda parts, factors, storage: plain(parts, [], storage))
    assert "grad_x" in cases.overspent(eight_bit_cases.run_operator(problem), truth, budget)


def _arguments(kind: str) -> dict[str, tuple[Any, ...]]:
    problem = eight_bit_cases.make(kind, 12, 32, 16, 4)
    of = problem.plain
    x, down, up = (each.clone().requires_grad_() for each in (of.x, of.down, of.up))
    weights = [problem.values], [problem.row_scale]
    h = lora.reference_project(of.x, [of.down], [1.5], 0.0, None)
    return {
        "quantize_rows": ([of.x, of.x], [torch.rand(32), torch.rand(32)], STORAGE[kind]),
        "eight_bit_linear": (x, problem.values, problem.row_scale, None),
        "eight_bit_linear_backward": ([of.grad], *weights),
        "eight_bit_forward": (x, *weights, [], [down], [up], [1.5], 0.0, None, None),
        "eight_bit_backward": ([of.grad], of.x, *weights, [of.down], [of.up], h, [1.5], 0.0, None, True, True, True),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list(_arguments("fp8")))
def test_opcheck(kind: str, name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.zerolora, name).default, _arguments(kind)[name])


def test_bad_input_names_the_values() -> None:
    weight = ops.EightBitWeight(*eight_bit.quantize_rows(torch.randn(16, 32), "fp8"))
    down, up = torch.randn(4, 32), torch.randn(16, 4)

    def call(weight: ops.EightBitWeight, x: Tensor) -> Any:
        return ops.eight_bit_group(x, [weight], [None], [down], [up], [1.0])

    with pytest.raises(ValueError, match="under ZeRO-3 gather the parameter first"):
        call(ops.EightBitWeight(weight.values.new_empty(0), weight.row_scale), torch.randn(5, 32))
    with pytest.raises(ValueError, match=r"all uint8 \(e4m3\) or all int8"):
        call(ops.EightBitWeight(torch.randn(16, 32), weight.row_scale), torch.randn(5, 32))
    with pytest.raises(ValueError, match=r"scales per row .* \(16,\) and dtype torch.float16"):
        call(ops.EightBitWeight(weight.values, weight.row_scale.half()), torch.randn(5, 32))
