"""Random LoRA problems, their float64 truth from the same inputs, and the error budget a result may spend.

Budget of y (u the unit roundoff of the stored type, 2^-24 that of the fp32 sums, c = 2):
    |err| <= u |y| + u |x W^T| + 2u |h||B|^T + c (I + R) 2^-24 (|x||W|^T + |h||B|^T) + |B| times the error of h
and the same for dX; for dA and dB u |result| + u |dh|^T|x| (dh, h are stored rounded) + the error of their fp32 sums.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ops import reference

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
FP32 = 2.0**-24
C = 2.0


@dataclass
class Problem:
    """One adapted linear: x[T,I], W[O,I], A[R,I], B[O,R], the gradient of y[T,O], the scale, dropout and its seed."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    down: Tensor
    up: Tensor
    grad: Tensor
    scale: float
    p: float = 0.0
    seed: Tensor | None = None

    def mask(self) -> Tensor | None:
        if self.seed is None or self.p == 0.0:
            return None
        return reference.build_dropout_mask(self.seed, self.x.shape[0], self.x.shape[1], self.p, torch.float64)


@dataclass
class Results:
    y: Tensor
    grad_x: Tensor
    grad_down: Tensor
    grad_up: Tensor

    def named(self) -> dict[str, Tensor]:
        return {"y": self.y, "grad_x": self.grad_x, "grad_down": self.grad_down, "grad_up": self.grad_up}


def make(
    T: int,
    width: int,
    out: int,
    rank: int,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    bias: bool = False,
    p: float = 0.0,
    scale: float = 1.7,
    adapter_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Problem:
    """Normal inputs of unit size, weights of size 1/sqrt(I), so that every term of y weighs about the same."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype, size: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * size).to(dtype)

    adapter = adapter_dtype or dtype
    return Problem(
        x=normal(T, width),
        weight=normal(out, width, size=width**-0.5),
        bias=normal(out) if bias else None,
        down=normal(rank, width, size=width**-0.5, dtype=adapter),
        up=normal(out, rank, size=rank**-0.5, dtype=adapter),
        grad=normal(T, out),
        scale=scale,
        p=p,
        seed=torch.tensor([1234567890123 + seed], device=device) if p > 0 else None,
    )


def run_operator(problem: Problem) -> Results:
    """Forward and backward through the dispatcher (the kernels for CUDA tensors, once loaded)."""
    biases = [] if problem.bias is None else [problem.bias]
    tail = [problem.scale], problem.p, problem.seed
    adapters = [problem.down], [problem.up]
    ys, h = torch.ops.zerolora.lora_forward(problem.x, [problem.weight], biases, *adapters, *tail, None)
    grad_x, grad_downs, grad_ups = torch.ops.zerolora.lora_backward(
        [problem.grad], problem.x, [problem.weight], *adapters, h, *tail, True, True, True
    )
    return Results(ys[0], grad_x, grad_downs[0], grad_ups[0])


def truth_and_budget(problem: Problem) -> tuple[Results, Results]:
    """The float64 results from the operator's own (rounded) inputs, and the largest error allowed for each element."""
    stored, unit = problem.x.dtype, UNIT[problem.x.dtype]
    x, weight, grad = problem.x.double(), problem.weight.double(), problem.grad.double()
    down, up = (adapter.to(stored).double() for adapter in (problem.down, problem.up))
    bias = None if problem.bias is None else problem.bias.double()
    mask = problem.mask()
    m = torch.ones_like(x) if mask is None else mask
    h = problem.scale * ((m * x) @ down.t())
    y = x @ weight.t() + h @ up.t() + (0.0 if bias is None else bias)
    grad_x, grad_down, grad_up = reference.backward(grad, x, weight, down, up, h, problem.scale, mask)
    dh = problem.scale * (grad @ up)
    T, width = x.shape
    out, rank = up.shape
    h_err = C * width * FP32 * abs(problem.scale) * ((m * x).abs() @ down.abs().t()) + unit * h.abs()
    dh_err = C * out * FP32 * abs(problem.scale) * (grad.abs() @ up.abs()) + unit * dh.abs()
    h_up, dh_down = h.abs() @ up.abs().t(), m * (dh.abs() @ down.abs())
    sums_y = C * (width + rank) * FP32 * (x.abs() @ weight.abs().t() + h_up)
    sums_x = C * (out + rank) * FP32 * (grad.abs() @ weight.abs() + dh_down)
    # cuBLAS may round the product before it adds it to the output: seen on an H200 at T=300, I=512.
    product_y, product_x = (x @ weight.t()).abs(), (grad @ weight).abs()
    y_budget = unit * (y.abs() + product_y + h_up) + sums_y + h_err @ up.abs().t()
    if bias is not None:
        y_budget += 2 * unit * bias.abs()
    x_budget = unit * (grad_x.abs() + product_x + dh_down) + sums_x + m * (dh_err @ down.abs())
    adapter_unit = UNIT[problem.down.dtype]
    down_budget = adapter_unit * grad_down.abs() + (dh_err + C * T * FP32 * dh.abs()).t() @ (m * x).abs()
    up_budget = adapter_unit * grad_up.abs() + grad.abs().t() @ (h_err + C * T * FP32 * h.abs())
    floor = 1e-30  # an exact zero has no budget of its own
    budget = Results(y_budget + floor, x_budget + floor, down_budget + floor, up_budget + floor)
    return Results(y, grad_x, grad_down, grad_up), budget


def overspent(results: Results, truth: Results, budget: Results) -> dict[str, float]:
    """For each result that leaves its budget somewhere (or holds a NaN): the largest error over its budget."""
    found = {}
    for name, value in results.named().items():
        error = (value.detach().double() - truth.named()[name].detach()).abs() / budget.named()[name].detach()
        worst = float(error.max()) if error.numel() else 0.0
        if not worst <= 1.0:
            found[name] = worst
    return found


def separate_products(problem: Problem) -> Results:
    """The same layer as PEFT computes it, product by product in the stored type."""
    leaves = [t.detach().clone().requires_grad_() for t in (problem.x, problem.down, problem.up)]
    x, down, up = leaves
    mask = problem.mask()
    dropped = x if mask is None else x * mask.to(x.dtype)
    base = torch.nn.functional.linear(x, problem.weight, problem.bias)
    lora = torch.nn.functional.linear(torch.nn.functional.linear(dropped, down.to(x.dtype)), up.to(x.dtype))
    y = base + lora * problem.scale
    y.backward(problem.grad)
    assert x.grad is not None and down.grad is not None and up.grad is not None
    return Results(y.detach(), x.grad, down.grad, up.grad)


def rms(value: Tensor, truth: Tensor) -> float:
    return float((value.double() - truth).square().mean().sqrt())


def worse_than_torch(got: Tensor, torchs: Tensor, truth: Tensor) -> str | None:
    """None if the largest error of `got` is at most twice that of torch in the same type, plus one rounding of a value
    of typical size; otherwise both errors.
    """
    floor = UNIT[got.dtype] * float(truth.square().mean().sqrt())
    mine, theirs = (float((value.double() - truth).abs().max()) for value in (got, torchs))
    return None if mine <= 2 * theirs + floor else f"error {mine:.3e}, torch {theirs:.3e}, floor {floor:.3e}"


def check(problem: Problem) -> Results:
    """The operator's results, which must lie within the budget of their truth."""
    results = run_operator(problem)
    truth, budget = truth_and_budget(problem)
    spent = overspent(results, truth, budget)
    assert not spent, f"error over budget: {spent}"
    return results


def pack_mask(keep: torch.Tensor) -> torch.Tensor:
    """Pack keep[T,D], bool, into the bits that `reference.unpack_mask` reads."""
    rows, width = keep.shape
    padded = torch.nn.functional.pad(keep, (0, -width % 128)).view(rows, -1, 4, 4, 4, 2)  # row, b, q, c, j, e
    words = (padded.long() << reference._build_bit_shifts(keep.device)).sum((2, 4, 5))
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32).permute(1, 0, 2).contiguous()
