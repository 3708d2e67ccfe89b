"""Small mistakes in the experts' plain operator, one at a time: the comparison with the truth must show each."""

import importlib.util
import inspect
from types import ModuleType

import pytest
import torch
from torch import Tensor

from ops import experts_plain
from tests.numerics.expert_cases import Problem, make, truth

# The line as it is, and with the mistake. H, I and the rank are equal, so that no shape gives a mistake away.
MUTATIONS = {
    "no scale in h of gate_up": (
        "s_gu * (_apply_mask(x_e, masks[0], rows) @ a_RH.t())",
        "_apply_mask(x_e, masks[0], rows) @ a_RH.t()",
    ),
    "no scale in h of down": ("h = s_d * (", "h = ("),
    "no scale in dh of gate_up": ("dh = s_gu * (du @ b_UR)", "dh = du @ b_UR"),
    "no scale in dh of down": ("dh = s_d * (dy @ b_HR)", "dh = dy @ b_HR"),
    "the other matrix's scale": (
        "(s_gu, s_d, p, alpha, limit) = shape, scalars",
        "(s_d, s_gu, p, alpha, limit) = shape, scalars",
    ),
    "dA and dB swapped": (
        "grads_gu if need_factors else [], grads_d if need_factors else []",
        "grads_gu, grads_d[::-1]",
    ),
    "dA transposed": (
        "grads_d[0][rows.e] = (w * dh).t() @ _apply_mask(act, masks[1], rows)",
        "grads_d[0][rows.e] = _apply_mask(act, masks[1], rows).t() @ (w * dh)",
    ),
    "the router's weight left out of dA": ("(w * dh).t()", "dh.t()"),
    "the router's weight left out of dB": ("(w * h_d[rows.span", "(h_d[rows.span"),
    "the router's weight left out of dX": ("activate_backward(w * g,", "activate_backward(g,"),
    "one row too few for each expert": ("counts.cumsum(0)", "(counts.cumsum(0) - 1).clamp(min=0)"),
    "one row too many for each expert": ("counts.cumsum(0)", "(counts.cumsum(0) + 1).clamp(max=len(order))"),
    "the rows of the first expert begin one late": ("rows, begin = [], 0", "rows, begin = [], 1"),
    "an unstable order's other token": ("pairs // K", "pairs.flip(0) // K"),
    "another expert's frozen gate_up": ("x_e @ gate_up[rows.e].t()", "x_e @ gate_up[rows.e - 1].t()"),
    "another expert's frozen down": ("g = dy @ down[rows.e]", "g = dy @ down[rows.e - 1]"),
    "another expert's A": ("a_RH = gate_up_factors[0][rows.e]", "a_RH = gate_up_factors[0][rows.e - 1]"),
    "another expert's B": ("b_UR = gate_up_factors[1][rows.e]", "b_UR = gate_up_factors[1][rows.e - 1]"),
    "another expert's bias of gate_up": ("biases[0][rows.e]", "biases[0][rows.e - 1]"),
    "another expert's bias of down": ("o + biases[1][rows.e]", "o + biases[1][rows.e - 1]"),
    "the bias left out of the weight's gradient": ("grad_flat[rows.pairs] += (dy", "grad_flat[rows.pairs] += 0 * (dy"),
    "one mask for both matrices": ("seed[i : i + 1]", "seed[:1]"),
    "dX without the mask": ("_apply_mask(dh @ a_RH, masks[0], rows)", "dh @ a_RH"),
    "the mask of sorted rows": ("x * mask[rows.pairs]", "x * mask[rows.span]"),
    "gate and up swapped": ("else u.chunk(2, dim=-1)", "else u.chunk(2, dim=-1)[::-1]"),
    "their gradients swapped": ("else torch.cat(grads, dim=-1)", "else torch.cat(grads[::-1], dim=-1)"),
    "outputs left in sorted order": ("out[rows.pairs] = ", "out[rows.span] = "),
    "gradients left in sorted order": ("grad_rows[rows.pairs] = ", "grad_rows[rows.span] = "),
    "padding computed with": (
        "h_gu[rows.span, : b_UR.shape[1]] @ b_UR.t()",
        "h_gu[rows.span, -b_UR.shape[1] :] @ b_UR.t()",
    ),
}


def mutated(old: str, new: str) -> ModuleType:
    """The operator's module with one piece of its text replaced."""
    text = inspect.getsource(experts_plain)
    assert old in text, f"the operator no longer has: {old}"
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("mutated", loader=None))  # type: ignore[arg-type]
    exec(compile(text.replace(old, new), "mutated", "exec"), vars(module))
    return module


def computed(plain: ModuleType, problem: Problem) -> dict[str, Tensor]:
    """y and all gradients by a module's own two functions."""
    E, H, I = problem.down.shape  # noqa: E741
    shape, form = [E, I, H, 0, 0], ["plain", "plain", problem.activation, "halves"]
    numbers = [*problem.scales, problem.p, problem.alpha, problem.limit]
    weights = [problem.gate_up], [problem.down], problem.biases, problem.gate_up_factors, problem.down_factors
    y, *kept = plain.forward(
        problem.hidden, problem.index, problem.weights, *weights, shape, form, numbers, problem.seed
    )
    x, w, of_gate_up, of_down = plain.backward(
        problem.grad, problem.hidden, problem.weights, *weights, *kept, shape, form, numbers, problem.seed, *[True] * 3
    )
    named = dict(zip(problem.trained(), (x, w, *of_gate_up, *of_down), strict=True))
    return {"y": y} | named


def is_true(plain: ModuleType, problem: Problem) -> bool:
    y, expected = truth(problem)
    found = computed(plain, problem)
    return all(
        torch.allclose(found[name], value, rtol=1e-9, atol=1e-9) for name, value in ({"y": y} | expected).items()
    )


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make(13, 3, 5, 8, 8, 8, bias=True, p=0.25)


def test_the_operator_as_it_is(problem: Problem) -> None:
    assert is_true(experts_plain, problem)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_shows(name: str, problem: Problem) -> None:
    module = mutated(*MUTATIONS[name])
    try:
        assert not is_true(module, problem)
    except (RuntimeError, ValueError) as error:
        pytest.fail(f"the mistake ends in an error and is none that could go unseen: {error}")
