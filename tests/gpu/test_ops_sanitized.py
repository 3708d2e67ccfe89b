"""Every kernel once on small ragged shapes, to run under compute-sanitizer (which slows a program 10 to 100 times).

    for tool in memcheck racecheck; do
        compute-sanitizer --tool $tool python -m pytest tests/gpu/test_ops_sanitized.py
    done
    compute-sanitizer --tool initcheck python -m pytest tests/gpu/test_ops_sanitized.py -k alone

initcheck does not see what cuBLAS writes through the bulk copy engine and reports every read of it, by torch's kernels
too: it is run on the tests in which only copies from the host and our kernels write device memory.
"""

import pytest
import torch

import ops
from ops import eight_bit
from tests.numerics import cases, eight_bit_cases

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
        (130, 264, 136, 72, torch.bfloat16, 0.1),
        (130, 136, 1032, 24, torch.bfloat16, 0.0),
        (65, 77, 129, 5, torch.bfloat16, 0.1),
        (65, 77, 129, 20, torch.float32, 0.1),
    ],
)
def test_forward_and_backward(T, width, out, rank, dtype, p):
    ops.load_backend("cuda")
    problem = cases.make(T, width, out, rank, dtype, "cuda", p=p, bias=True)
    truth, budget = cases.truth_and_budget(problem)
    assert not cases.overspent(cases.run_operator(problem), truth, budget)


def _bound(truth, terms, depth, dtype):
    return cases.UNIT[dtype] * truth.abs() + 2 * depth * cases.FP32 * terms + 1e-30


@pytest.mark.parametrize("what", ["both", "u", "g"])
@pytest.mark.parametrize(
    ("T", "D", "rank", "dtype"),
    [
        (300, 264, 16, torch.bfloat16),
        (300, 1288, 64, torch.float16),
        (130, 4104, 24, torch.bfloat16),
        (65, 77, 5, torch.bfloat16),
        (200, 136, 16, torch.float32),
    ],
)
def test_rank_pass_alone(T, D, rank, dtype, what):
    ops.load_backend("cuda")
    generator = torch.Generator().manual_seed(0)
    p = 0.0 if what == "both" else 0.1
    seed = torch.tensor([77]) if p else None
    z = torch.randn(T, D, generator=generator).to(dtype)
    shape = (D, rank) if what == "both" else (rank, D)
    factor = None if what == "g" else torch.randn(shape, generator=generator).to(dtype)
    v = None if what == "u" else torch.randn(T, rank, generator=generator).to(dtype)
    on_card = [None if t is None else t.cuda() for t in (z, factor, v)]
    got = torch.ops.zerolora.rank_pass(*on_card, p, None if seed is None else seed.cuda())
    wide = [None if t is None else t.double() for t in (z, factor, v)]
    truth = torch.ops.zerolora.rank_pass(*wide, p, seed)
    terms = torch.ops.zerolora.rank_pass(*(None if t is None else t.abs() for t in wide), p, seed)
    for result, true, sizes, depth in zip(got, truth, terms, (D, T), strict=True):
        assert bool(((result.cpu().double() - true).abs() <= _bound(true, sizes, depth, dtype)).all())


def _check_expand(T, D, rank, dtype, by_rank, p):
    ops.load_backend("cuda")
    generator = torch.Generator().manual_seed(0)
    h, q = (torch.randn(rows, rank, generator=generator).to(dtype) for rows in (T, D))
    seed = torch.tensor([77]) if p else None
    on_card = q.t().contiguous().cuda().t() if by_rank else q.cuda()
    got = torch.ops.zerolora.rank_expand(h.cuda(), on_card, p, None if seed is None else seed.cuda())
    truth = torch.ops.zerolora.rank_expand(h.double(), q.double(), p, seed)
    terms = torch.ops.zerolora.rank_expand(h.double().abs(), q.double().abs(), p, seed)
    assert bool(((got.cpu().double() - truth).abs() <= _bound(truth, terms, rank, dtype)).all())


@pytest.mark.parametrize(("T", "D", "rank", "p"), [(300, 264, 16, 0.0), (130, 136, 64, 0.1), (65, 520, 128, 0.1)])
def test_rank_expand_alone(T, D, rank, p):
    _check_expand(T, D, rank, torch.bfloat16, False, p)


@pytest.mark.parametrize("by_rank", [False, True])
@pytest.mark.parametrize(
    ("T", "D", "rank", "dtype"),
    [
        (4096, 8, 8, torch.bfloat16),
        (4099, 1288, 16, torch.float16),
        (4161, 520, 32, torch.bfloat16),
        (5000, 1544, 48, torch.float16),
        (4500, 2056, 64, torch.bfloat16),
    ],
)
def test_rank_expand_through_bulk_stores(T, D, rank, dtype, by_rank):
    """Without a mask and from 4096 tokens on Hopper stores through the bulk copy engine (not seen by initcheck)."""
    _check_expand(T, D, rank, dtype, by_rank, 0.0)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="the kernel is Hopper's (sm_90a)"
)
@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize(
    ("T", "D", "depths", "rank", "dtype"),
    [
        (1, 8, (8,), 8, torch.bfloat16),
        (300, 520, (200,), 0, torch.float16),
        (130, 264, (72, 8), 24, torch.bfloat16),
        (515, 1032, (136, 64, 264), 72, torch.float16),
    ],
)
def test_frozen_product_through_bulk_copies(T, D, depths, rank, dtype, forward):
    """With a bias forward and a mask backward; its copies and stores are not seen by initcheck."""
    ops.load_backend("cuda")
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    def laid(cols):  # [D, cols], or the transpose of [cols, D]
        return normal(D, cols) if forward else normal(cols, D).t()

    x, w, h, q = [normal(T, depth) for depth in depths], [laid(depth) for depth in depths], normal(T, rank), laid(rank)
    bias, bits = normal(D) if forward else None, None
    if not forward:
        bits = cases.pack_mask(torch.rand(T, D, generator=generator) < 0.9)
    run = torch.ops.zerolora.frozen_product
    on_card = [t.cuda() for t in x], [t.cuda() for t in w], h.cuda(), q.cuda()
    got = run(*on_card, *(None if t is None else t.cuda() for t in (bias, bits)))
    results = []
    for kind in (torch.Tensor.double, lambda t: t.double().abs()):
        wide_bias = None if bias is None else kind(bias)
        results.append(run([kind(t) for t in x], [kind(t) for t in w], kind(h), kind(q), wide_bias, bits))
    truth, terms = results
    assert bool(((got.cpu().double() - truth).abs() <= _bound(truth, terms, sum(depths) + rank, dtype)).all())


@pytest.mark.parametrize("count", [(24, 64), (3, 64), (7, 9)])
def test_nf4_alone(count):
    ops.load_backend("cuda")
    rows, cols = count
    packed = torch.randint(0, 256, ((rows * cols + 1) // 2,), dtype=torch.uint8).cuda()
    blocks = (rows * cols + 63) // 64
    state = [torch.rand(blocks).cuda(), torch.linspace(-1, 1, 16).cuda()]
    got = torch.ops.zerolora.dequantize_nf4(packed, state, rows, cols, 64, 1, torch.bfloat16)
    expected = torch.ops.zerolora.dequantize_nf4(
        packed.cpu(), [s.cpu() for s in state], rows, cols, 64, 1, torch.bfloat16
    )
    assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("storage", [torch.uint8, torch.int8], ids=str)
@pytest.mark.parametrize("widths", [(264,), (136, 72), (77,), (40, 13)], ids=str)
def test_quantised_rows_alone(widths, storage):
    ops.load_backend("cuda")
    torch.manual_seed(0)
    parts = [torch.randn(131, width).bfloat16() for width in widths]
    for factors in ([], [torch.rand(width) for width in widths]):
        given = [[each.cuda() for each in group] for group in (parts, factors)]
        q, scale = torch.ops.zerolora.quantize_rows(*given, storage)
        wanted_q, wanted_scale = eight_bit.reference_quantize_rows(parts, factors, storage)
        assert torch.equal(q.cpu(), wanted_q) and torch.equal(scale.cpu(), wanted_scale)


@pytest.mark.parametrize("kind", eight_bit_cases.KINDS)
@pytest.mark.parametrize(("T", "width", "out"), [(300, 272, 144), (65, 77, 129)])
def test_eight_bit_forward_and_backward(kind, T, width, out):
    """Weights are turned over for dX."""
    ops.load_backend("cuda")
    problem = eight_bit_cases.make(kind, T, width, out, 16, device="cuda", p=0.1, bias=True)
    eight_bit_cases.check(problem, tensor_cores=kind == "fp8")
