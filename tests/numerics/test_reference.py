"""The reference and the operators on the CPU: gradients, schemas, edges, dropout, NF4, and mutations that must show."""

from typing import Any

import pytest
import torch

import ops
from ops import lora, reference
from tests.numerics import cases

PROJECT = torch.ops.zerolora.lora_project
FORWARD = torch.ops.zerolora.lora_forward
BACKWARD = torch.ops.zerolora.lora_backward


def group(dtype=torch.float64, ranks=(4, 8), outs=(24, 8), bias=True, width=16, grad=True):
    torch.manual_seed(0)
    x = torch.randn(2, 3, width, dtype=dtype, requires_grad=grad)
    weights = [torch.randn(out, width, dtype=dtype) for out in outs]
    biases = [torch.randn(out, dtype=dtype, requires_grad=grad) for out in outs] if bias else []
    downs = [torch.randn(rank, width, dtype=dtype, requires_grad=grad) for rank in ranks]
    ups = [torch.randn(out, rank, dtype=dtype, requires_grad=grad) for out, rank in zip(outs, ranks, strict=True)]
    return x, weights, biases, downs, ups


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("bias", [False, True])
def test_gradcheck(bias, p):
    x, weights, biases, downs, ups = group(bias=bias)
    seed = torch.tensor([12345]) if p else None

    def function(x, *rest):
        b, d, u = rest[: len(biases)], rest[len(biases) : len(biases) + 2], rest[len(biases) + 2 :]
        return tuple(FORWARD(x, weights, list(b), list(d), list(u), [2.0, 0.5], p, seed, None)[0])

    assert torch.autograd.gradcheck(function, (x, *biases, *downs, *ups))


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_opcheck(p):
    x, weights, biases, downs, ups = group(dtype=torch.float32)
    seed = torch.tensor([5]) if p else None
    tail = [2.0, 0.5], p, seed
    torch.library.opcheck(FORWARD.default, (x, weights, biases, downs, ups, *tail, None))
    ys, h = FORWARD(x, weights, biases, downs, ups, *tail, None)
    grads = [torch.randn_like(y) for y in ys]
    tensors = [t.detach() for t in (x, h)], [[t.detach() for t in ts] for ts in (weights, downs, ups)]
    args = grads, tensors[0][0], *tensors[1], tensors[0][1], *tail
    torch.library.opcheck(BACKWARD.default, (*args, True, True, True))
    torch.library.opcheck(BACKWARD.default, (*args, False, True, False))
    torch.library.opcheck(PROJECT.default, (tensors[0][0], tensors[1][1], *tail))
    constants = [[t.detach() for t in ts] for ts in (weights, biases, downs, ups)]
    torch.library.opcheck(FORWARD.default, (tensors[0][0], *constants, *tail, tensors[0][1]))


def test_outputs_may_be_changed_in_place():
    """As Falcon's layers change them: of several outputs none may be a view in autograd's eyes."""
    x, weights, biases, downs, ups = group()
    gradients = []
    for in_place in (True, False):
        first, second = FORWARD(x, weights, biases, downs, ups, [2.0, 0.5], 0.0, None, None)[0]
        shift = second.sum(-1, keepdim=True)
        if in_place:
            first += shift
        else:
            first = first + shift
        gradients.append(torch.autograd.grad(first.square().sum(), [x, *biases, *downs, *ups]))
    for changed, whole in zip(*gradients, strict=True):
        torch.testing.assert_close(changed, whole)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_projection_made_before_gives_the_same_outputs(p):
    x, *lists = group(dtype=torch.float32)
    seed = torch.tensor([5]) if p else None
    tail = [2.0, 0.5], p, seed
    with torch.no_grad():
        ys, h = FORWARD(x, *lists, *tail, None)
        before = PROJECT(x, lists[2], *tail)
        others, nothing = FORWARD(x, *lists, *tail, before)
    assert torch.equal(h, before) and nothing.numel() == 0
    assert all(torch.equal(one, other) for one, other in zip(ys, others, strict=True))
    with pytest.raises(ValueError, match=r"h has shape \(\d+, 8\)"), torch.no_grad():
        FORWARD(x, *lists, *tail, before[:, :8])


def test_opcheck_non_contiguous_and_plain():
    _, weights, _, downs, ups = group(dtype=torch.float32, bias=False)
    turned = torch.randn(16, 6).t().requires_grad_()
    torch.library.opcheck(FORWARD.default, (turned, weights, [], downs, ups, [1.0, 1.0], 0.0, None, None))
    grad, down, up = torch.randn(6, 24), downs[0].detach(), ups[0].detach()
    targets = torch.zeros(6, 16), torch.zeros_like(down), torch.zeros_like(up)
    plain = torch.ops.zerolora.adapter_backward_.default
    torch.library.opcheck(plain, (grad, turned.detach(), down, up, 2.0, *targets, True), test_utils="test_schema")


@pytest.mark.parametrize("fullgraph_backend", ["aot_eager"])
def test_compiles_without_a_graph_break(fullgraph_backend):
    x, weights, biases, downs, ups = group(dtype=torch.float32)
    eager = ops.lora_group(x, weights, biases, downs, ups, [2.0, 0.5])

    def function(x):
        return ops.lora_group(x, weights, biases, downs, ups, [2.0, 0.5])

    compiled = torch.compile(function, fullgraph=True, backend=fullgraph_backend)(x)
    for one, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(one, other)
    total: Any = sum(y.sum() for y in eager)
    first = torch.autograd.grad(total, (x, *downs, *ups))
    second = torch.autograd.grad(sum(y.sum() for y in compiled), (x, *downs, *ups))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("T", [1, 127, 1000])
@pytest.mark.parametrize("rank", [1, 4, 24, 64])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_float32_stays_in_its_budget(T, rank, p):
    problem = cases.make(T, 77, 129, rank, torch.float32, bias=True, p=p)
    truth, budget = cases.truth_and_budget(problem)
    assert not cases.overspent(cases.run_operator(problem), truth, budget)


def test_no_tokens():
    results = cases.run_operator(cases.make(0, 16, 24, 4, torch.float32))
    assert results.y.shape == (0, 24)
    assert not results.grad_down.any() and not results.grad_up.any()


def test_zero_up_gives_exactly_zero_grad_down():
    problem = cases.make(50, 64, 32, 8, torch.float32)
    problem.up.zero_()
    assert not cases.run_operator(problem).grad_down.any()


def test_gradients_that_are_not_needed_are_none():
    x, weights, _, downs, ups = group(dtype=torch.float32, bias=False)
    x = x.detach()
    ys = ops.lora_group(x, weights, [], downs, ups, [1.0, 1.0])
    total: Any = sum(y.sum() for y in ys)
    total.backward()
    assert x.grad is None
    assert all(t.grad is not None for t in (*downs, *ups))


def test_a_second_derivative_is_refused():
    x, weights, _, downs, ups = group(dtype=torch.float32, bias=False)
    ys = ops.lora_group(x, weights, [], downs, ups, [1.0, 1.0])
    grads = [torch.randn_like(y).requires_grad_() for y in ys]
    (grad,) = torch.autograd.grad(ys, x, grads, create_graph=True)
    with pytest.raises(RuntimeError, match="derivative"):
        grad.square().sum().backward()


def test_saves_the_parameters_themselves_and_nothing_of_size_t_by_o():
    x, weights, _, downs, ups = group(dtype=torch.float32, bias=False)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ops.lora_group(x, weights, [], downs, ups, [1.0, 1.0], dropout=0.5)
    pointers = {t.data_ptr() for t in saved}
    assert {t.data_ptr() for t in (x, *weights, *downs, *ups)} <= pointers
    extra = [t for t in saved if t.data_ptr() not in {u.data_ptr() for u in (x, *weights, *downs, *ups)}]
    assert sum(t.numel() for t in extra) <= 6 * 16 + 1  # h of both projections, and the seed


def test_weight_emptied_and_refilled_between_forward_and_backward():
    """As ZeRO-3 does it: `param.data` is empty in between, and other memory afterwards."""
    problem = cases.make(20, 16, 24, 4, torch.float32)
    parameters = [
        torch.nn.Parameter(t, requires_grad=i > 0) for i, t in enumerate((problem.weight, problem.down, problem.up))
    ]
    expected = cases.run_operator(problem)
    x = problem.x.requires_grad_()
    y = ops.lora_linear(x, parameters[0], None, parameters[1], parameters[2], problem.scale)
    copies = [p.data.clone() for p in parameters]
    for parameter in parameters:
        parameter.data = torch.empty(0)
    for parameter, copy in zip(parameters, copies, strict=True):
        parameter.data = copy
    y.backward(problem.grad)
    torch.testing.assert_close(x.grad, expected.grad_x)
    torch.testing.assert_close(parameters[1].grad, expected.grad_down)


def test_mask_keep_rate_and_reproducibility():
    seed, p = torch.tensor([2**61 + 3]), 0.1
    mask = reference.build_dropout_mask(seed, 1000, 77, p, torch.float64)
    assert torch.equal(mask, reference.build_dropout_mask(seed, 1000, 77, p, torch.float64))
    assert not torch.equal(mask, reference.build_dropout_mask(seed + 1, 1000, 77, p, torch.float64))
    assert set(mask.unique().tolist()) == {0.0, 1 / (1 - p)}
    kept = float((mask > 0).double().mean())
    assert abs(kept - (1 - p)) < 4 * (p * (1 - p) / mask.numel()) ** 0.5


@pytest.mark.parametrize(("rows", "width"), [(3, 8), (5, 128), (7, 264)])
def test_a_mask_packed_into_bits(rows, width):
    keep = torch.rand(rows, width) < 0.5
    bits = cases.pack_mask(keep)
    assert bits.shape == ((width + 127) // 128, rows, 4) and bits.dtype == torch.int32
    assert torch.equal(reference.unpack_mask(bits, width), keep)
    for d in range(width):  # csrc/common/common.cuh: of call d % 128 // 32, element d % 8
        place = 4 * (d % 128 // 32) + d % 8 // 2 + 16 * (d % 2)
        assert torch.equal(bits[d // 128, :, d % 32 // 8] >> place & 1, keep[:, d].int())


def test_philox_matches_the_published_answers():
    """Known answers of Philox4x32 with 10 rounds (Random123, kat_vectors), the same code with 10 for 7."""
    original = reference.PHILOX_ROUNDS
    reference.PHILOX_ROUNDS = 10
    try:
        words = reference._draw_philox(0, torch.tensor([0]))
    finally:
        reference.PHILOX_ROUNDS = original
    assert [int(word) for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_checkpointing_recomputes_the_same_mask():
    from torch.utils.checkpoint import checkpoint

    problem = cases.make(30, 16, 24, 4, torch.float32)
    leaves = [t.requires_grad_() for t in (problem.x, problem.down, problem.up)]

    def layer(x, down, up):
        return ops.lora_linear(x, problem.weight, None, down, up, 1.0, 0.5)

    found: list[list[Any]] = []
    for kind in (None, False, True):
        torch.manual_seed(3)
        for leaf in leaves:
            leaf.grad = None
        y = layer(*leaves) if kind is None else checkpoint(layer, *leaves, use_reentrant=kind)
        y.backward(problem.grad)
        found.append([leaf.grad for leaf in leaves])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_plain_call():
    problem = cases.make(12, 16, 24, 4, torch.float64)
    grad = torch.randn(3, 4, 24, dtype=torch.float64)
    problem.x = problem.x.view(3, 4, 16)
    x, down, up = problem.x.requires_grad_(), problem.down.requires_grad_(), problem.up.requires_grad_()
    y = problem.scale * (x @ down.t() @ up.t())
    expected = torch.autograd.grad(y, (x, down, up), grad)
    args = grad, x.detach(), down.detach(), up.detach(), problem.scale
    got = ops.lora_backward(*args)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)
    targets: Any = tuple(torch.ones_like(t) for t in got)
    torch.ops.zerolora.adapter_backward_(*args, *targets, True)
    for target, one in zip(targets, expected, strict=True):
        torch.testing.assert_close(target, one + 1)


@pytest.mark.parametrize("nested", [False, True])
def test_nf4_matches_bitsandbytes(nested):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(24, 64)
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested, blocksize=64)
    packed.quant_state = state
    nf4 = ops.Nf4Weight.from_parameter(packed)
    expected = functional.dequantize_4bit(packed, state)
    got = torch.ops.zerolora.dequantize_nf4(packed, list(nf4.state), 24, 64, nf4.block, nf4.nested_block, torch.float32)
    torch.testing.assert_close(got, expected, rtol=1.2e-7, atol=0)  # products in another order: the last bit
    problem = cases.make(10, 64, 24, 4, torch.float32)
    adapter = [None], [problem.down.requires_grad_()], [problem.up.requires_grad_()], [1.5]
    x = problem.x.requires_grad_()
    (one,), (two,) = ops.nf4_group(x, [nf4], *adapter), ops.lora_group(x, [got], *adapter)
    assert torch.equal(one, two)
    for a, b in zip(
        *(torch.autograd.grad(y, (x, problem.down, problem.up), problem.grad) for y in (one, two)), strict=True
    ):
        assert torch.equal(a, b)
    states = list(nf4.state)
    args: Any = x, [packed], states, [24], 64, nf4.nested_block, [], adapter[1], adapter[2], [1.5], 0.0, None, None
    torch.library.opcheck(torch.ops.zerolora.nf4_forward.default, args)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"down": torch.randn(4, 15)}, r"lora_down \(4, 15\)"),
        ({"up": torch.randn(24, 5)}, r"lora_up \(24, 5\)"),
        ({"down": torch.randn(0, 16), "up": torch.randn(24, 0)}, "r=0"),
        ({"down": torch.randn(257, 16), "up": torch.randn(24, 257)}, "r=257"),
        ({"down": torch.randn(4, 16).half(), "up": torch.randn(24, 4).half()}, "float16"),
        ({"weight": torch.randn(24, 16).double()}, "float64"),
        ({"weight": torch.randn(24, 12)}, r"weight \(24, 12\)"),
        ({"x": torch.randn(16)}, r"shape \(16,\)"),
        ({"dropout": 1.0}, r"dropout=1\.0"),
        ({"bias": torch.randn(23)}, "biases"),
    ],
)
def test_bad_input_names_the_values(change, message):
    arguments = {
        "x": torch.randn(6, 16),
        "weight": torch.randn(24, 16),
        "bias": None,
        "down": torch.randn(4, 16),
        "up": torch.randn(24, 4),
        "scale": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        ops.lora_linear(**{**arguments, **change})


def test_plain_call_refuses_a_scale_that_is_no_number_and_other_tokens():
    grad, x, down, up = torch.randn(6, 24), torch.randn(6, 16), torch.randn(4, 16), torch.randn(24, 4)
    with pytest.raises(ValueError, match="scale=nan"):
        ops.lora_backward(grad, x, down, up, float("nan"))
    with pytest.raises(ValueError, match="types, devices and leading dimensions must match"):
        ops.lora_backward(grad[:5], x, down, up, 1.0)


MUTATIONS = {
    "scale dropped from dh": lambda p, r: setattr(r, "grad_down", r.grad_down / p.scale),
    "scale applied twice in dB": lambda p, r: setattr(r, "grad_up", r.grad_up * p.scale),
    "dA and dB swapped": lambda p, r: _swap(r),
    "last tile skipped in y": lambda p, r: r.y[-1:].copy_((p.x @ p.weight.t())[-1:]),
    "last columns of dX lack the adapter": lambda p, r: r.grad_x[:, -8:].copy_((p.grad @ p.weight)[:, -8:]),
    "1/(1-p) applied twice": lambda p, r: setattr(r, "grad_down", r.grad_down / (1 - p.p)),
    "backward without the mask": lambda p, r: setattr(r, "grad_x", _without_mask(p)),
    "one NaN left unwritten": lambda p, r: r.grad_up[0, 0].fill_(float("nan")),
}


def _swap(results):
    results.grad_down, results.grad_up = results.grad_up.t().contiguous(), results.grad_down.t().contiguous()


def _without_mask(problem):
    h = reference.compute_h(problem.x, problem.down, problem.scale)
    return reference.backward(problem.grad, problem.x, problem.weight, problem.down, problem.up, h, problem.scale)[0]


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_overspends_the_budget(name):
    problem = cases.make(130, 64, 64, 8, torch.float32, p=0.1)
    results = cases.run_operator(problem)
    truth, budget = cases.truth_and_budget(problem)
    assert not cases.overspent(results, truth, budget)
    MUTATIONS[name](problem, results)
    assert cases.overspent(results, truth, budget)


def test_h_has_room_for_16_byte_reads():
    assert [lora.compute_h_width(rank) for rank in (1, 8, 9, 256)] == [8, 8, 16, 256]
