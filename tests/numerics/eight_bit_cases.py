"""LoRA problems on an 8-bit base: float64 truth of the quantised operands, and the error budget a result may spend.

What is bounded is the arithmetic, not the quantisation: the truth is t (x_q W_q^T) v + h B^T in float64, from the same
8-bit operands. In addition to the adapter's budget (tests/numerics/cases.py) a frozen term F of depth K may spend
u (|y| + |F|) for its roundings and, with |F| the sum of magnitudes,
    fp32 sums             2 K 2^-24 |F|
    sums of an FP8 core   (K / 32) 2^-13 |F|: an instruction adds 32 products to a sum with 13 bits behind the
                          largest summand are kept
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ops import reference
from ops.eight_bit import STORAGE
from tests.numerics import cases

KINDS = tuple(STORAGE)


@dataclass
class EightBitProblem:
    """A problem with a weight of 8-bit values and scales; `plain.weight` is not used."""

    plain: cases.Problem
    values: Tensor
    row_scale: Tensor

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x_q, t, g_q, u by the definition."""
        x = reference.quantize_rows(self.plain.x, self.values.dtype)
        grad = reference.quantize_rows(self.plain.grad.float() * self.row_scale, self.values.dtype)
        return *x, *grad


def make(
    kind: str, T: int, width: int, out: int, rank: int, dtype: torch.dtype = torch.bfloat16, **more: Any
) -> EightBitProblem:
    """As `cases.make`, its weight quantised."""
    plain = cases.make(T, width, out, rank, dtype, **more)
    return EightBitProblem(plain, *reference.quantize_rows(plain.weight, STORAGE[kind]))


def run_operator(problem: EightBitProblem) -> cases.Results:
    """Forward and backward through the dispatcher."""
    of = problem.plain
    weights, adapters = ([problem.values], [problem.row_scale]), ([of.down], [of.up])
    tail = [of.scale], of.p, of.seed
    biases = [] if of.bias is None else [of.bias]
    ys, h = torch.ops.zerolora.eight_bit_forward(of.x, *weights, biases, *adapters, *tail, None)
    grad_x, grad_downs, grad_ups = torch.ops.zerolora.eight_bit_backward(
        [of.grad], of.x, *weights, *adapters, h, *tail, True, True, True
    )
    return cases.Results(ys[0], grad_x, grad_downs[0], grad_ups[0])


def truth_and_budget(problem: EightBitProblem, *, tensor_cores: bool = False) -> tuple[cases.Results, cases.Results]:
    """As `cases.truth_and_budget`, from the quantised operands."""
    of = problem.plain
    none = torch.zeros_like(of.weight)
    truth, budget = cases.truth_and_budget(replace(of, weight=none))
    x_q, t, g_q, u = problem.operands()
    wide = [reference.decode_8bit_values(each).double() for each in (x_q, problem.values, g_q)]
    unit = cases.UNIT[of.x.dtype]

    def add(name: str, left: Tensor, right: Tensor, row: Tensor, column: Tensor | float) -> None:
        frozen = row[:, None].double() * (left @ right) * column
        magnitude = row[:, None].double() * (left.abs() @ right.abs()) * column
        depth = left.shape[1]
        sums = cases.C * depth * cases.FP32 + (depth / 32 + 1) * 2.0**-13 * tensor_cores
        setattr(truth, name, getattr(truth, name) + frozen)
        spent = unit * (getattr(truth, name).abs() + frozen.abs()) + sums * magnitude
        setattr(budget, name, getattr(budget, name) + spent)

    add("y", wide[0], wide[1].t(), t, problem.row_scale.double())
    add("grad_x", wide[2], wide[1], u, 1.0)
    return truth, budget


def check(problem: EightBitProblem, *, tensor_cores: bool = False) -> cases.Results:
    """The operator's results; AssertionError where one leaves its budget."""
    results = run_operator(problem)
    found = cases.overspent(results, *truth_and_budget(problem, tensor_cores=tensor_cores))
    assert not found, found
    return results


def dequantize_rows(values: Tensor, row_scale: Tensor) -> Tensor:
    """Return W[O,I] = v W_q in float32."""
    return reference.decode_8bit_values(values) * row_scale[:, None]
