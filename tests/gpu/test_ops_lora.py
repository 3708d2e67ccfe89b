"""The CUDA operators against float64, on a card: values, edges, determinism, NF4, streams, checkpointing."""

from typing import Any

import pytest
import torch

import ops
from tests.numerics import cases
from tests.numerics.early_stop import assert_last_outputs_are_computed_once

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]
TYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rank", [1, 4, 8, 16, 24, 64, 128, 256])
def test_ranks(rank, dtype):
    cases.check(cases.make(300, 512, 384, rank, dtype, "cuda", bias=rank % 16 == 0))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("T", "width", "out"),
    [(1, 128, 128), (127, 512, 256), (8191, 256, 384), (333, 1000, 264), (65, 77, 129), (2048, 4096, 1024), (40, 8, 8)],
)
def test_shapes(T, width, out, dtype):
    cases.check(cases.make(T, width, out, 16, dtype, "cuda"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fp32_adapters_on_a_16_bit_base(dtype):
    results = cases.check(cases.make(1000, 512, 768, 16, dtype, "cuda", adapter_dtype=torch.float32))
    assert results.grad_down.dtype == results.grad_up.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [16, 64])
def test_error_is_not_above_separate_products(rank, dtype):
    problem = cases.make(4096, 2048, 2048, rank, dtype, "cuda")
    ours, theirs = cases.run_operator(problem), cases.separate_products(problem)
    truth, _ = cases.truth_and_budget(problem)
    for name, value in ours.named().items():
        mine, other = cases.rms(value, truth.named()[name]), cases.rms(theirs.named()[name], truth.named()[name])
        assert mine <= 1.05 * other, f"{name}: rms error {mine:.3e}, separate products {other:.3e}"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_no_tokens(dtype):
    results = cases.run_operator(cases.make(0, 256, 128, 16, dtype, "cuda"))
    assert results.y.shape == (0, 128) and results.grad_x.shape == (0, 256)
    assert not results.grad_down.any() and not results.grad_up.any()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_zero_up_gives_exactly_zero_grad_down_and_zero_scale_no_adapter(dtype):
    problem = cases.make(200, 512, 256, 16, dtype, "cuda")
    problem.up.zero_()
    results = cases.check(problem)
    assert not results.grad_down.any()
    problem = cases.make(200, 512, 256, 16, dtype, "cuda", scale=0.0)
    results = cases.check(problem)
    assert not results.grad_down.any() and not results.grad_up.any()
    torch.testing.assert_close(results.y, problem.x @ problem.weight.t())


@pytest.mark.parametrize("rank", [16, 64])
def test_twenty_runs_give_the_same_bits(rank):
    problem = cases.make(8192, 4096, 4096, rank, torch.bfloat16, "cuda", p=0.1)
    first = cases.run_operator(problem)
    for _ in range(19):
        for name, value in cases.run_operator(problem).named().items():
            assert torch.equal(value, first.named()[name]), name


LONG = [(8191, 6152), (2048, 28672)]  # many tiles a CTA: every slot of the rings is used again and again
CLUSTERS = [(500, 4096), (1000, 4104), (1024, 1032), (2048, 1032), (2048, 4096), (4095, 4096)]  # 1 to 8 add their sums


@pytest.mark.parametrize("rank", [16, 32, 64])
@pytest.mark.parametrize(("T", "D"), LONG + CLUSTERS)
def test_passes(T, D, rank):
    z, p, v = (torch.randn(shape, device="cuda").bfloat16() for shape in ((T, D), (D, rank), (T, rank)))
    wide = [t.double() for t in (z, p, v)]
    sizes = [t.abs() for t in wide]
    u, g = torch.ops.zerolora.rank_pass(z, p, v, 0.0, None)
    alone = torch.ops.zerolora.rank_pass(z, p.t().contiguous(), None, 0.0, None)[0]
    by_rank = torch.ops.zerolora.rank_pass(z, None, v, 0.0, None)[1]
    for results, (left, right), (a, b), depth in (
        ((u, alone), (wide[0], wide[1]), (sizes[0], sizes[1]), D),
        ((g, by_rank.t()), (wide[0].t(), wide[2]), (sizes[0].t(), sizes[2]), T),
    ):
        truth = left @ right
        bound = cases.UNIT[torch.bfloat16] * truth.abs() + 2 * depth * cases.FP32 * (a @ b)
        for result in results:
            assert bool(((result.double() - truth).abs() <= bound).all())


def test_offsets_beyond_32_bits():
    T, out = 262_208, 8_200  # T * O = 2^31 + 2.5 million elements
    z = torch.randn(T, out, device="cuda", dtype=torch.bfloat16)
    up, h = torch.randn(out, 16, device="cuda").bfloat16(), torch.randn(T, 16, device="cuda").bfloat16()
    u, g = torch.ops.zerolora.rank_pass(z, up, h, 0.0, None)
    tail = slice(T - 100, T)
    assert not cases.worse_than_torch(u[tail], z[tail] @ up, z[tail].double() @ up.double())
    exact: Any = sum(z[i : i + 32768].t().double() @ h[i : i + 32768].double() for i in range(0, T, 32768))
    assert not cases.worse_than_torch(g, z.t() @ h, exact)
    x, weight = torch.randn(T, 64, device="cuda").bfloat16(), torch.randn(out, 64, device="cuda").bfloat16()
    down = torch.randn(16, 64, device="cuda").bfloat16()
    y = ops.lora_linear(x, weight, None, down, up, 1.0)
    problem = cases.Problem(x[tail], weight, None, down, up, z[tail], 1.0)
    truth, budget = cases.truth_and_budget(problem)
    assert bool(((y[tail].double() - truth.y).abs() <= budget.y).all())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("ranks", [(16, 4, 40), (16, 16, 16), (64, 64, 64)], ids=str)
@pytest.mark.parametrize("T", [300, 5000])
def test_groups_stay_in_the_budget_of_their_members(T, ranks, p, dtype):
    """Also where projections of one rank share a launch, and with so many tokens that the adapter goes first."""
    parts = [
        cases.make(T, 256, out, rank, dtype, "cuda", seed=i)
        for i, (out, rank) in enumerate(zip((1256, 64, 72), ranks, strict=True))
    ]
    for part in parts:
        part.x, part.p, part.seed = parts[0].x, p, torch.tensor([99], device="cuda") if p else None
    leaves = [part.x.requires_grad_()]
    leaves += [part.down.requires_grad_() for part in parts] + [part.up.requires_grad_() for part in parts]
    args: Any = [part.weight for part in parts], [], leaves[1:4], leaves[4:], [part.scale for part in parts]
    ys, _ = torch.ops.zerolora.lora_forward(leaves[0], *args, p, parts[0].seed, None)
    grad_x, *grads = torch.autograd.grad(ys, leaves, [part.grad for part in parts])
    total, allowed = (torch.zeros(T, 256, device="cuda", dtype=torch.float64) for _ in range(2))
    for i, part in enumerate(parts):
        truth, budget = cases.truth_and_budget(part)
        total += truth.grad_x
        allowed += budget.grad_x + 2 * cases.UNIT[dtype] * total.abs()  # rounded after each projection
        spent = cases.overspent(cases.Results(ys[i].detach(), truth.grad_x, grads[i], grads[3 + i]), truth, budget)
        assert not spent, (i, spent)
    assert bool(((grad_x.double() - total).abs() <= allowed).all())


def test_adapters_that_are_views_of_one_buffer():
    """Neighbours in one buffer are read where they lie; the gradients arrive in the buffer's."""
    parts = [cases.make(200, 256, out, 16, torch.bfloat16, "cuda", seed=i) for i, out in enumerate((128, 64))]
    factors = [part.down for part in parts] + [part.up for part in parts]
    flat = torch.cat([factor.view(-1) for factor in factors]).requires_grad_()
    pieces = flat.split([factor.numel() for factor in factors])
    views = [piece.view(factor.shape) for piece, factor in zip(pieces, factors, strict=True)]
    weights, grads = [part.weight for part in parts], [part.grad for part in parts]
    ys = ops.lora_group(parts[0].x, weights, [], views[:2], views[2:], [1.7, 1.7])
    (got,) = torch.autograd.grad(ys, flat, grads)
    copies = [factor.clone().requires_grad_() for factor in factors]
    expected = ops.lora_group(parts[0].x, weights, [], copies[:2], copies[2:], [1.7, 1.7])
    assert all(torch.equal(y, other) for y, other in zip(ys, expected, strict=True))
    one_by_one = torch.autograd.grad(expected, copies, grads)
    assert torch.equal(got, torch.cat([grad.reshape(-1) for grad in one_by_one]))


def test_partial_gradients_biases_and_unused_projections():
    parts = [cases.make(200, 256, out, 16, torch.float32, "cuda", seed=i, bias=True) for i, out in enumerate((128, 64))]
    x = parts[0].x
    assert parts[0].bias is not None
    leaves = [parts[0].bias.requires_grad_(), parts[0].up.requires_grad_()]
    weights, biases = [part.weight for part in parts], [part.bias for part in parts]
    ys = ops.lora_group(x, weights, biases, [part.down for part in parts], [part.up for part in parts], [1.0, 1.0])
    grad_bias, grad_up = torch.autograd.grad(ys[0], leaves, parts[0].grad)  # the second projection's output is not used
    torch.testing.assert_close(grad_bias, parts[0].grad.sum(0))
    exact_up = parts[0].grad.double().t() @ (x.double() @ parts[0].down.double().t())
    plain_up = parts[0].grad.t() @ (x @ parts[0].down.t())
    assert not cases.worse_than_torch(grad_up, plain_up, exact_up)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_checkpoint_does_not_compute_its_last_outputs_again(dropout):
    assert_last_outputs_are_computed_once("cuda", dropout)


def test_a_second_derivative_is_refused():
    problem = cases.make(64, 128, 64, 8, torch.float32, "cuda")
    x, down = problem.x.requires_grad_(), problem.down.requires_grad_()
    y = ops.lora_linear(x, problem.weight, None, down, problem.up, 1.0)
    (grad,) = torch.autograd.grad(y, x, problem.grad.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="derivative"):
        grad.square().sum().backward()


def test_non_contiguous_input_and_side_stream():
    problem = cases.make(256, 512, 384, 16, torch.bfloat16, "cuda")
    problem.x = torch.randn(512, 256, device="cuda").bfloat16().t()
    problem.grad = torch.randn(256, 2, 384, device="cuda").bfloat16()[:, 0]
    cases.check(problem)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = cases.run_operator(problem)
    stream.synchronize()
    assert torch.equal(results.y, cases.run_operator(problem).y)


def test_checkpointing_recomputes_the_same_mask():
    from torch.utils.checkpoint import checkpoint

    problem = cases.make(256, 512, 384, 16, torch.bfloat16, "cuda")
    leaves = [t.requires_grad_() for t in (problem.x, problem.down, problem.up)]

    def layer(x, down, up):
        return ops.lora_linear(x, problem.weight, None, down, up, 1.0, 0.3)

    def grads(use_reentrant):
        torch.manual_seed(5)
        if use_reentrant is None:
            y = layer(*leaves)
        else:
            y = checkpoint(layer, *leaves, use_reentrant=use_reentrant)
        return torch.autograd.grad(y, leaves, problem.grad) if not use_reentrant else _backward(y, leaves, problem.grad)

    plain = grads(None)
    for kind in (False, True):
        for one, other in zip(plain, grads(kind), strict=True):
            assert torch.equal(one, other)


def _backward(y, leaves, grad):
    for leaf in leaves:
        leaf.grad = None
    y.backward(grad)
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_plain_call_and_its_accumulating_form(dtype):
    problem = cases.make(300, 512, 384, 16, dtype, "cuda")
    problem.weight = torch.zeros_like(problem.weight)
    args = problem.grad.view(3, 100, -1), problem.x.view(3, 100, -1), problem.down, problem.up, problem.scale
    got = ops.lora_backward(*args)
    truth, budget = cases.truth_and_budget(problem)
    spent = cases.overspent(cases.Results(truth.y, got[0].view(300, -1), got[1], got[2]), truth, budget)
    assert not spent, spent
    before = tuple(torch.randn_like(g) for g in got)
    after: Any = tuple(b.clone() for b in before)
    torch.ops.zerolora.adapter_backward_(*args, *after, True)
    h, dh = problem.scale * (problem.x @ problem.down.t()), problem.scale * (problem.grad @ problem.up)
    products = (dh @ problem.down).view(3, 100, -1), dh.t() @ problem.x, problem.grad.t() @ h
    exact = truth.grad_x.view(3, 100, -1), truth.grad_down, truth.grad_up
    for old, new, product, true in zip(before, after, products, exact, strict=True):
        assert not cases.worse_than_torch(new, old + product, old.double() + true)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_nf4(dtype, nested):
    functional = pytest.importorskip("bitsandbytes.functional")
    problem = cases.make(300, 512, 384, 16, dtype, "cuda")
    packed, state = functional.quantize_4bit(problem.weight, quant_type="nf4", compress_statistics=nested, blocksize=64)
    packed.quant_state = state
    weight = ops.Nf4Weight.from_parameter(packed)
    expected = functional.dequantize_4bit(packed, state)
    got = torch.ops.zerolora.dequantize_nf4(
        packed, list(weight.state), 384, 512, weight.block, weight.nested_block, dtype
    )
    assert torch.equal(got, expected)
    adapter = [None], [problem.down.requires_grad_()], [problem.up.requires_grad_()], [1.7]
    (y,) = ops.nf4_group(problem.x, [weight], *adapter)
    (other,) = ops.lora_group(problem.x, [expected], *adapter)
    assert torch.equal(y, other)
    for one, two in zip(
        *(torch.autograd.grad(v, (problem.down, problem.up), problem.grad) for v in (y, other)), strict=True
    ):
        assert torch.equal(one, two)


def test_opcheck_on_the_card():
    problem = cases.make(64, 128, 64, 8, torch.float32, "cuda", p=0.1)
    args: Any = problem.x, [problem.weight], [], [problem.down], [problem.up], [1.0], 0.1, problem.seed, None
    torch.library.opcheck(torch.ops.zerolora.lora_forward.default, args)
    _, h = torch.ops.zerolora.lora_forward(*args)
    back = [problem.grad], problem.x, [problem.weight], [problem.down], [problem.up], h, [1.0], 0.1, problem.seed
    torch.library.opcheck(torch.ops.zerolora.lora_backward.default, (*back, True, True, True))


def test_bad_input_names_the_values():
    problem = cases.make(64, 128, 64, 8, torch.bfloat16, "cuda")
    with pytest.raises(ValueError, match="cpu"):
        ops.lora_linear(problem.x, problem.weight, None, problem.down.cpu(), problem.up, 1.0)
    with pytest.raises(ValueError, match=r"lora_down \(8, 64\)"):
        ops.lora_linear(problem.x, problem.weight, None, problem.down[:, :64], problem.up, 1.0)
    with pytest.raises(ValueError, match=r"weight \(64, 64\) for x \(64, 128\)"):
        ops.lora_linear(problem.x, problem.weight[:, :64], None, problem.down, problem.up, 1.0)
    with pytest.raises(ValueError, match=r"reference.*cuda is already loaded"):
        ops.load_backend("reference")
