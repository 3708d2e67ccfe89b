"""The 8-bit operators on a card: bits of the quantisation, budgets of the products, groups, dropout, determinism."""

import math

import pytest
import torch

import ops
from ops import eight_bit, reference
from ops.derivative import REFERENCE
from ops.eight_bit import STORAGE
from tests.numerics import cases, eight_bit_cases

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]
KINDS = eight_bit_cases.KINDS


def needs(kind: str) -> None:
    if kind == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a card with FP8 products")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "widths", [(4096,), (14336, 14336), (4096, 1024, 1024), (57344,), (77,), (40, 13), (8,)], ids=str
)
def test_quantised_rows_have_the_references_bits(kind, dtype, widths):
    T = min(5000, 2**24 // sum(widths))  # more rows than there are CTAs
    torch.manual_seed(0)
    parts = [torch.randn(T, width, device="cuda").to(dtype) for width in widths]
    parts[0][3] = 0.0
    parts[0][5, 2] = 3e4
    parts[0][7, 1] = math.nan
    factors = [torch.rand(width, device="cuda") for width in widths]
    for given in ([], factors):
        q, scale = torch.ops.zerolora.quantize_rows(parts, given, STORAGE[kind])
        wanted_q, wanted_scale = eight_bit.reference_quantize_rows(parts, given, STORAGE[kind])
        assert torch.equal(scale.view(torch.int32), wanted_scale.view(torch.int32)) or torch.equal(
            scale.nan_to_num(-1.0), wanted_scale.nan_to_num(-1.0)
        )
        rows = [row for row in range(T) if row != 7]
        assert torch.equal(q[rows], wanted_q[rows])
        assert reference.decode_8bit_values(q[7]).isnan().any() or kind == "int8"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("T", "width", "out"),
    [(300, 512, 384), (8191, 256, 384), (333, 1008, 272), (65, 77, 129), (4096, 4096, 1024), (5, 64, 32), (40, 8, 8)],
)
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_errors_stay_in_the_budget(kind, T, width, out, p):
    needs(kind)
    problem = eight_bit_cases.make(kind, T, width, out, 16, device="cuda", p=p, bias=T == 300)
    eight_bit_cases.check(problem, tensor_cores=kind == "fp8")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_types(dtype):
    eight_bit_cases.check(eight_bit_cases.make("int8", 300, 512, 384, 16, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens(kind):
    results = eight_bit_cases.run_operator(eight_bit_cases.make(kind, 0, 256, 128, 16, device="cuda"))
    assert results.y.shape == (0, 128) and results.grad_x.shape == (0, 256)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("depth", [4096, 28672])
def test_a_product_of_fp8_is_as_exact_as_its_sums(fast, depth):
    """The root mean square of the error over that of the result: rounding to bf16 alone gives 0.0017."""
    needs("fp8")
    torch.manual_seed(0)
    q, scale = eight_bit.quantize_rows(torch.randn(512, depth, device="cuda"), "fp8")
    right, column = eight_bit.quantize_rows(torch.randn(1024, depth, device="cuda"), "fp8")
    found = torch.ops.zerolora.eight_bit_product(q, scale, right, column, fast)
    wide = [reference.decode_8bit_values(each).double() for each in (q, right)]
    wanted = (wide[0] @ wide[1].t()) * scale[:, None] * column
    error = cases.rms(found, wanted) / float(wanted.square().mean().sqrt())
    print(f"depth {depth}, {'fast' if fast else 'exact'} sums: {error:.5f}")
    assert error <= (0.01 if fast else 0.0025)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_and_the_derivative_in_cpp(kind):
    """A group through autograd: what the reference gives from the same 8-bit operands."""
    needs(kind)
    torch.manual_seed(0)
    x = torch.randn(2, 2100, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    outs = (512, 128, 128)
    weights = [ops.EightBitWeight(*eight_bit.quantize_rows(torch.randn(o, 512, device="cuda"), kind)) for o in outs]
    downs = [(torch.randn(16, 512, device="cuda") / 22).bfloat16().requires_grad_() for _ in outs]
    ups = [(torch.randn(o, 16, device="cuda") / 4).bfloat16().requires_grad_() for o in outs]
    ys = ops.eight_bit_group(x, weights, [None] * 3, downs, ups, [0.5] * 3)
    grads = [torch.randn_like(y) for y in ys]
    found = torch.autograd.grad(ys, [x, *downs, *ups], grads)
    values, scales = [w.values for w in weights], [w.row_scale for w in weights]
    wanted_ys, h = REFERENCE["eight_bit_forward"](x, values, scales, [], downs, ups, [0.5] * 3, 0.0, None, None)
    wanted = REFERENCE["eight_bit_backward"](
        grads, x, values, scales, downs, ups, h, [0.5] * 3, 0.0, None, True, True, True
    )
    for one, other in zip((*ys, *found), (*wanted_ys, wanted[0], *wanted[1], *wanted[2]), strict=True):
        difference = float((one.float() - other.float()).square().mean().sqrt() / other.float().square().mean().sqrt())
        assert difference <= 6e-3, difference


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_runs_give_the_same_bits(kind):
    needs(kind)
    problem = eight_bit_cases.make(kind, 4096, 1024, 2048, 16, device="cuda", p=0.1)
    first = eight_bit_cases.run_operator(problem)
    for _ in range(19):
        for name, value in eight_bit_cases.run_operator(problem).named().items():
            assert torch.equal(value, first.named()[name]), name


@pytest.mark.parametrize(("rows", "cols"), [(128, 128), (4096, 1024), (144, 272), (132, 260), (77, 129)])
def test_a_layer_without_an_adapter(rows, cols):
    """Its backward turns the weight; ragged ones too."""
    torch.manual_seed(0)
    weight = ops.EightBitWeight(*eight_bit.quantize_rows(torch.randn(rows, cols, device="cuda"), "int8"))
    x = torch.randn(40, cols, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = ops.eight_bit_linear(x, weight, torch.ones(rows, device="cuda", dtype=torch.bfloat16))
    grad = torch.randn_like(y)
    (grad_x,) = torch.autograd.grad(y, x, grad)
    wanted = eight_bit.reference_linear(x.detach(), weight.values, weight.row_scale, None) + 1
    # Sums of up to 1,024 products, with 8 bits in bf16, rounded by the product and by what is added to it.
    torch.testing.assert_close(y, wanted, atol=0.1, rtol=0.02)
    wanted_x = eight_bit.reference_linear_backward([grad], [weight.values], [weight.row_scale])
    torch.testing.assert_close(grad_x, wanted_x, atol=0.1, rtol=0.02)
