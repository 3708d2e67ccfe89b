"""The frozen product with the adapter's term in it: Hopper's kernel alone, and through the public operators.

The operators take it from 4096 tokens on. Alone it must spend one rounding of the result and the error of fp32 sums.
"""

from typing import Any

import pytest
import torch

import ops
from ops import primitives, reference
from tests.numerics import cases

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("kernels"),
    pytest.mark.skipif(not HOPPER, reason="needs an NVIDIA GPU of compute capability 9.0"),
]
T = 4133  # no multiple of a tile's rows
WIDE = 1792  # T x WIDE fills 0.86 of two rounds of tiles on 132 multiprocessors: the operators take it at this depth


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, size: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * size).to(dtype)


def operands(rows, cols, depths, rank, dtype, forward):
    """x of each part, w of each part as [D,K] (backward: a view of [K,D]), h, q as [D,R] (backward: of [R,D])."""
    x = [normal(rows, depth, dtype=dtype) for depth in depths]
    shapes = [(cols, depth) if forward else (depth, cols) for depth in depths]
    w = [normal(*shape, dtype=dtype, size=sum(depths) ** -0.5) for shape in shapes]
    q = normal(*((cols, rank) if forward else (rank, cols)), dtype=dtype, size=max(rank, 1) ** -0.5)
    return x, w if forward else [m.t() for m in w], normal(rows, rank, dtype=dtype), q if forward else q.t()


def mask_bits(rows, cols, p=0.1, seed=1234567890123):
    mask = reference.build_dropout_mask(torch.tensor([seed], device="cuda"), rows, cols, p, torch.float32)
    return cases.pack_mask(mask != 0)


def assert_one_rounding(got, x, w, h, q, bias=None, bits=None):
    def wide(absolute):
        def widen(t):
            return None if t is None else t.double().abs() if absolute else t.double()

        args = [widen(t) for t in x], [widen(t) for t in w], widen(h), widen(q), widen(bias)
        return primitives.reference_frozen_product(*args, bits)

    truth, terms = wide(False), wide(True)
    depth = sum(t.shape[1] for t in x) + h.shape[1]
    bound = cases.UNIT[got.dtype] * truth.abs() + 2 * depth * cases.FP32 * terms + 1e-30
    excess = (got.double() - truth).abs() / bound
    assert bool((excess <= 1).all()), f"{float(excess.nan_to_num(nan=1e30).max()):.3f} of the bound"


SHAPES = [  # T, D, K of each part, R
    (1, 8, (8,), 8),
    (127, 264, (72,), 0),
    (128, 256, (64,), 16),
    (129, 1032, (520,), 24),
    (300, 264, (8, 136), 16),
    (300, 648, (264,), 64),
    (255, 520, (1000, 24, 64), 40),
    (8191, 136, (200,), 128),
    (1000, 2056, (328, 40, 8, 512), 256),
    (4097, 1024, (4096,), 16),
    (8192, 4096, (1024, 256, 256), 48),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize(("rows", "cols", "depths", "rank"), SHAPES, ids=str)
def test_it_rounds_once_and_repeats_its_bits(rows, cols, depths, rank, forward, dtype):
    args = operands(rows, cols, depths, rank, dtype, forward)
    run = torch.ops.zerolora.frozen_product
    got = run(*args, None, None)
    assert_one_rounding(got, *args)
    assert torch.equal(got, run(*args, None, None))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "cols", "depths", "rank"), SHAPES, ids=str)
def test_with_a_bias_forward_and_a_mask_backward(rows, cols, depths, rank, dtype):
    run = torch.ops.zerolora.frozen_product
    args = *operands(rows, cols, depths, rank, dtype, True), normal(cols, dtype=dtype)
    assert_one_rounding(run(*args, None), *args)
    args = *operands(rows, cols, depths, rank, dtype, False), None, mask_bits(rows, cols)
    assert_one_rounding(run(*args), *args)


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_every_rank_of_a_tile(forward):
    for rank in range(0, 257, 8):
        args = operands(200, 264, (136,), rank, torch.bfloat16, forward)
        assert_one_rounding(torch.ops.zerolora.frozen_product(*args, None, None), *args)


@pytest.mark.parametrize(("rows", "cols"), [(1, 8), (130, 136), (300, 264), (8191, 1032)])
def test_every_bit_of_the_mask_finds_its_element(rows, cols):
    h, q = torch.ones(rows, 8, device="cuda").bfloat16(), torch.ones(8, cols, device="cuda").bfloat16()
    x, w = normal(rows, 72), torch.zeros(72, cols, device="cuda").bfloat16()
    keep = torch.rand(rows, cols, device="cuda") < 0.5
    got = torch.ops.zerolora.frozen_product([x], [w.t()], h, q.t(), None, cases.pack_mask(keep))
    assert torch.equal(got, 8 * keep.bfloat16())


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_pieces_of_wider_matrices(forward):
    """Columns of x and h, rows and columns of w and q: only the distance of rows has to be a multiple of 16 bytes."""
    x, h = normal(300, 656)[:, 8:528], normal(300, 96)[:, 40:64]
    shapes = ((264, 520), (264, 24)) if forward else ((520, 264), (24, 264))
    w, q = (normal(rows + 3, cols + 16, size=0.05)[3:, 8 : cols + 8] for rows, cols in shapes)
    args = [x], [w if forward else w.t()], h, q if forward else q.t()
    assert_one_rounding(torch.ops.zerolora.frozen_product(*args, None, None), *args)


def test_twenty_runs_give_the_same_bits():
    for forward in (True, False):
        args = operands(8192, 4096, (4096,), 64, torch.bfloat16, forward)
        bits = None if forward else mask_bits(8192, 4096)
        first = torch.ops.zerolora.frozen_product(*args, None, bits)
        for _ in range(19):
            assert torch.equal(torch.ops.zerolora.frozen_product(*args, None, bits), first)


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize(("cols", "depth"), [(8200, 64), (64, 8200)])
def test_offsets_beyond_32_bits(cols, depth, forward):
    rows = 262_208  # 2^31 + 2.5 million elements in y, or in x
    x, w, h, q = operands(rows, cols, (depth,), 16, torch.bfloat16, forward)
    bits = None  # random ones: every word is a mask
    if not forward:
        bits = torch.randint(-(2**31), 2**31, ((cols + 127) // 128, rows, 4), device="cuda").int()
    got = torch.ops.zerolora.frozen_product(x, w, h, q, None, bits)
    assert bool(torch.isfinite(got[:: 2**12]).all())
    piece = slice(rows - 300, rows)
    assert_one_rounding(got[piece], [x[0][piece]], w, h[piece], q, None, None if bits is None else bits[:, piece])


def test_what_the_kernel_does_not_take_is_refused():
    args = operands(300, 264, (72,), 16, torch.bfloat16, True)
    with pytest.raises(ValueError, match=r"frozen_product of \(300, 264\) in BFloat16"):
        torch.ops.zerolora.frozen_product([normal(300, 73)[:, :72]], *args[1:], None, None)
    with pytest.raises(ValueError, match="in Float"):
        torch.ops.zerolora.frozen_product(
            [args[0][0].float()], [args[1][0].float()], args[2].float(), args[3].float(), None, None
        )


# ---- through the public operators


def count(run):
    """How often the kernel ran."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    on_card = (event for event in profile.events() if event.device_type == cuda)
    return sum("frozen" in event.name for event in on_card)


def group(outs, rows=T, width=WIDE, rank=16):
    parts = [cases.make(rows, width, out, rank, torch.bfloat16, "cuda", seed=i) for i, out in enumerate(outs)]
    for part in parts:
        part.x = parts[0].x
    return parts


def run_group(parts, p=0.0, need_down=True, need_up=True):
    seed = torch.tensor([99], device="cuda") if p else None
    names = "grad", "weight", "down", "up", "scale"
    grads, weights, downs, ups, scales = ([getattr(part, name) for part in parts] for name in names)
    ys, h = torch.ops.zerolora.lora_forward(parts[0].x, weights, [], downs, ups, scales, p, seed, None)
    back = grads, parts[0].x, weights, downs, ups, h, scales, p, seed, True, need_down, need_up
    return ys, *torch.ops.zerolora.lora_backward(*back)


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize(
    ("outs", "rows", "width", "launches"),
    [
        ((WIDE,), T, WIDE, 2),
        ((WIDE, WIDE, 128), T, WIDE, 3),  # y one by one, the third leaves the card half empty; dX in one launch
        ((136,) * 5, 4096, 1024, 1),  # more projections than parts: cuBLAS adds the last
        ((384,), T, 512, 0),
        ((WIDE,), 4095, WIDE, 0),
        ((WIDE,), T, WIDE + 1, 0),
    ],
)
def test_where_the_operators_take_it(outs, rows, width, launches, p):
    parts = group(outs, rows, width)
    assert count(lambda: run_group(parts, p)) == launches


def test_without_the_gradient_of_a_the_mask_is_not_stored():
    parts = group((WIDE, 128))
    assert count(lambda: run_group(parts, 0.0, False)) == 2
    assert count(lambda: run_group(parts, 0.1, False)) == 1  # y; cuBLAS adds both projections to the masked dh A
    seed = torch.tensor([99], device="cuda")
    grad_x = run_group(parts, 0.1, False)[1]
    total: Any = 0
    allowed: Any = 0
    for part in parts:
        part.p, part.seed = 0.1, seed
        truth, budget = cases.truth_and_budget(part)
        total = total + truth.grad_x
        allowed = allowed + budget.grad_x + 2 * cases.UNIT[grad_x.dtype] * total.abs()
    assert bool(((grad_x.double() - total).abs() <= allowed).all())


@pytest.mark.parametrize("rank", [16, 72])
def test_the_mask_of_dx_is_the_references(rank):
    """Bits that the pass over x leaves (the first of two launches at rank 72) reach dX: dh A is nonzero everywhere."""
    rows, width, seed = T, WIDE, torch.tensor([42], device="cuda")
    ones = [torch.ones(shape, device="cuda").bfloat16() for shape in ((rows, 8), (rank, width), (8, rank))]
    grad, down, up = ones
    weight, h = torch.zeros(8, width, device="cuda").bfloat16(), normal(rows, rank)
    args = [grad], normal(rows, width), [weight], [down], [up], h, [1.0], 0.5, seed, True, True, True
    mask = reference.build_dropout_mask(seed, rows, width, 0.5, torch.bfloat16)
    assert torch.equal(torch.ops.zerolora.lora_backward(*args)[0], 8 * rank * mask)


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize(
    ("outs", "rank"), [((WIDE, 136), 8), ((1784, 128, 128), 64), ((72,) * 6, 16), ((136, 72), 200)]
)
def test_a_group_stays_in_the_budget(outs, rank, p):
    parts = group(outs, rank=rank)
    one_launch = len(outs) <= 4
    seed = torch.tensor([99], device="cuda") if p else None
    ys, grad_x, grad_downs, grad_ups = run_group(parts, p)
    total = torch.zeros_like(grad_x, dtype=torch.float64)
    allowed: Any = 0
    for part, y, grad_down, grad_up in zip(parts, ys, grad_downs, grad_ups, strict=True):
        part.p, part.seed = p, seed
        truth, budget = cases.truth_and_budget(part)
        total += truth.grad_x
        allowed = allowed + budget.grad_x
        if not one_launch:  # rounded after each projection
            allowed += 2 * cases.UNIT[y.dtype] * total.abs()
        spent = cases.overspent(cases.Results(y, truth.grad_x, grad_down, grad_up), truth, budget)
        assert not spent, f"error over budget: {spent}"
    assert bool(((grad_x.double() - total).abs() <= allowed).all())


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_strided_input_and_gradient(p):
    problem = cases.make(T, WIDE, WIDE, 16, torch.bfloat16, "cuda", p=p)
    problem.x = normal(T, WIDE + 16)[:, 8 : WIDE + 8]
    problem.grad = normal(T, 2, WIDE)[:, 0]
    cases.check(problem)


@pytest.mark.parametrize(
    ("outs", "rows", "width", "together"), [((WIDE, 136), T, WIDE, True), ((8192, 520), 4096, 4096, False)]
)
def test_nf4_weights_of_a_group_go_together_up_to_64_mib(outs, rows, width, together):
    functional = pytest.importorskip("bitsandbytes.functional")
    parts = group(outs, rows, width)
    weights = []
    for part in parts:
        packed, state = functional.quantize_4bit(part.weight, quant_type="nf4", blocksize=64)
        packed.quant_state = state
        weights.append(ops.Nf4Weight.from_parameter(packed))
        part.weight = functional.dequantize_4bit(packed, state)
    x, downs, ups = parts[0].x.detach().requires_grad_(), [part.down for part in parts], [part.up for part in parts]
    grads, scales = [part.grad for part in parts], [part.scale for part in parts]

    def run():
        ys = ops.nf4_group(x, weights, [None] * 2, downs, ups, scales)
        return ys, torch.autograd.grad(ys, x, grads)[0]

    (ys, grad_x), (expected, other_x, *_) = run(), run_group(parts, need_down=False, need_up=False)
    assert all(torch.equal(y, other) for y, other in zip(ys, expected, strict=True))
    assert count(run) == 2  # the first y; dX of both, or of the first, to which cuBLAS adds the second:
    assert torch.equal(grad_x, other_x) == together  # rounded in between
    exact: Any = sum(cases.truth_and_budget(part)[0].grad_x for part in parts)
    assert not cases.worse_than_torch(grad_x, other_x, exact)


def test_a_graph_replays_forward_and_backward():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # gradients are awaited where leaves were made: a capture allows its own only
        problem = cases.make(T, WIDE, WIDE, 16, torch.bfloat16, "cuda")
        x = problem.x.requires_grad_()

        def run():
            y = ops.lora_linear(x, problem.weight, None, problem.down, problem.up, 1.0)
            return y, torch.autograd.grad(y, x, problem.grad)[0]

        expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = run()
    for _ in range(2):
        for result in results:
            result.detach().fill_(7.0)
        graph.replay()
        assert all(torch.equal(result, other) for result, other in zip(results, expected, strict=True))
