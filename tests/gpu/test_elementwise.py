"""The element-wise kernels against float64, on a card: values, gradients, edges, layouts, determinism."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import ops
from ops import elementwise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch.cuda.is_available() is False"),
]
TYPES = [torch.float32, torch.float16, torch.bfloat16]
FLOOR = {torch.float32: 1e-7, torch.float16: 1e-5, torch.bfloat16: 1e-4}  # of the largest value


@pytest.fixture(scope="module", autouse=True)
def kernels():
    if torch.cuda.is_available():
        assert ops.load_backend("cuda").name == "cuda"
    # Every torch.empty is filled with NaN: an element that a kernel does not write shows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)


def draw(*shape, dtype, seed=0, scale=1.0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, device="cuda", generator=generator) * scale).to(dtype).requires_grad_()


def plain_norm(offset):
    return lambda x, weight: elementwise.plain_rms_norm(x, weight, 1e-5, offset)


def plain_silu_mul(gate, up):
    return torch.nn.functional.silu(gate) * up


def plain_gelu_mul(gate, up):
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


GATED = [(elementwise.silu_mul, plain_silu_mul), (elementwise.gelu_mul, plain_gelu_mul)]


def plain_rope(q, k, cos, sin):
    R, half = cos.shape[-1], cos.shape[-1] // 2
    turned = []
    for x in (q, k):
        crossed = torch.cat([-x[..., half:R], x[..., :half]], dim=-1)
        turned.append(torch.cat([x[..., :R] * cos[:, None] + crossed * sin[:, None], x[..., R:]], dim=-1))
    return tuple(turned)


def results(function, inputs, extra=()):
    """Outputs, then the gradients of `inputs` for a fixed gradient of each output."""
    outputs = function(*inputs, *extra)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [draw(*y.shape, dtype=torch.float32, seed=50 + i).detach() for i, y in enumerate(outputs)]
    grads = [grad.bfloat16().to(y.dtype) for grad, y in zip(grads, outputs, strict=True)]  # the same in every type
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, inputs, grads)]


def spend(ours, plain, inputs, extra=()):
    """err(kernel, fp64) <= 2 err(torch in the same type, fp64) + floor, in the mean and at the worst element."""
    dtype = inputs[0].dtype
    wide = [t.detach().double().requires_grad_() for t in inputs]
    truth = results(plain, wide, [t.double() for t in extra])
    for index, (got, theirs, true) in enumerate(
        zip(results(ours, inputs, extra), results(plain, inputs, extra), truth, strict=True)
    ):
        assert got.dtype == dtype and got.shape == true.shape
        floor = FLOOR[dtype] * float(true.abs().max()) if true.numel() else 0.0
        mine, other = (got.double() - true).abs(), (theirs.double() - true).abs()
        for measure in (lambda e: float(e.square().mean().sqrt()), lambda e: float(e.max())):
            if true.numel():
                assert measure(mine) <= 2 * measure(other) + floor, f"result {index}"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(
    ("T", "D"),
    [
        (1, 8),
        (127, 64),
        (1000, 128),
        (33, 576),
        (300, 1000),
        (129, 2048),
        (8191, 4096),
        (17, 8192),
        (5, 16384),
        (50, 77),
        (9, 4097),
        (0, 64),
    ],
)
def test_norm(T, D, offset, dtype):
    weight = draw(D, dtype=dtype, seed=1).detach()
    spend(
        lambda x: elementwise.rms_norm(x, weight, 1e-5, offset),
        lambda x: plain_norm(offset)(x, weight.to(x.dtype)),
        [draw(T, D, dtype=dtype)],
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (2, 129, 64), (1000, 1536), (257, 14336), (7, 77), (0, 64)])
@pytest.mark.parametrize(("ours", "plain"), GATED, ids=["silu", "gelu"])
def test_gated_product(ours, plain, shape, dtype):
    spend(ours, plain, [draw(*shape, dtype=dtype, scale=3.0), draw(*shape, dtype=dtype, seed=1)])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("ours", "plain"), GATED, ids=["silu", "gelu"])
def test_gated_product_at_the_ends_of_its_range(ours, plain, dtype):
    gate = torch.tensor([-1e4, -200.0, -100.0, -88.0, -87.5, -20.0, 0.0, 20.0, 90.0, 1e4, 0.0, 0.0], device="cuda")
    gate = gate.to(dtype).repeat(8).requires_grad_()
    spend(ours, plain, [gate, torch.ones_like(gate).detach().requires_grad_()])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("ours", "plain"), GATED, ids=["silu", "gelu"])
def test_gated_product_of_two_halves_of_one_matrix(ours, plain, dtype):
    both = draw(100, 2 * 264, dtype=dtype)
    spend(lambda x: ours(*x.chunk(2, -1)), lambda x: plain(*x.chunk(2, -1)), [both])


def _heads_first(q, k):
    return q.transpose(1, 2), k.transpose(1, 2)


def _as_given(q, k):
    return q, k


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("B", "T", "heads", "kv_heads", "D", "R"),
    [
        (2, 65, 32, 8, 128, 128),
        (1, 2048, 9, 3, 64, 64),
        (3, 7, 4, 1, 96, 48),
        (1, 5, 2, 2, 10, 6),
        (1, 33, 64, 8, 256, 64),
        (1, 0, 4, 2, 64, 64),
    ],
)
@pytest.mark.parametrize("layout", ["projection", "heads first"])
def test_rope(B, T, heads, kv_heads, D, R, layout, dtype):
    cos, sin = (draw(B if T % 2 else 1, T, R, dtype=torch.float32, seed=7).detach().to(dtype) for _ in range(2))
    if layout == "projection":
        q, k = (draw(B, T, n, D, dtype=dtype, seed=n) for n in (heads, kv_heads))
        turn = _heads_first
    else:
        q, k = (draw(B, n, T, D, dtype=dtype, seed=n) for n in (heads, kv_heads))
        turn = _as_given
    spend(
        lambda q, k, cos, sin: elementwise.rope(*(*turn(q, k), cos, sin)),
        lambda q, k, cos, sin: plain_rope(*(*turn(q, k), cos, sin)),
        [q, k],
        [cos, sin],
    )
    for rotated in elementwise.rope(*(*turn(q, k), cos, sin)):
        assert rotated.transpose(1, 2).is_contiguous()


def test_the_same_bits_every_time_and_on_another_stream():
    x, weight = draw(8192, 4096, dtype=torch.bfloat16), draw(4096, dtype=torch.bfloat16, seed=1).detach()
    first = results(lambda x: elementwise.rms_norm(x, weight, 1e-5), [x])
    for _ in range(10):
        for one, other in zip(first, results(lambda x: elementwise.rms_norm(x, weight, 1e-5), [x]), strict=True):
            assert torch.equal(one, other)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        again = results(lambda x: elementwise.rms_norm(x, weight, 1e-5), [x])
    stream.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_inputs_that_are_not_contiguous_or_not_aligned():
    whole = draw(50, 200, dtype=torch.bfloat16)
    for view in (lambda x: x[:, 8:72], lambda x: x[:, 3:67], lambda x: x[:, :128:2], lambda x: x[:, :50].t()):
        width = view(whole).shape[-1]
        factor = draw(width, dtype=torch.bfloat16, seed=1).detach()
        spend(
            lambda x, view=view, factor=factor: elementwise.rms_norm(view(x), factor, 1e-5),
            lambda x, view=view, factor=factor: plain_norm(0.0)(view(x), factor.to(x.dtype)),
            [whole],
        )


def test_recomputing_frees_the_result_of_a_fused_layer():
    gate, up = draw(64, 256, dtype=torch.bfloat16), draw(64, 256, dtype=torch.bfloat16, seed=1)
    weight, down = draw(128, 256, dtype=torch.bfloat16, seed=2).detach(), draw(16, 256, dtype=torch.bfloat16, seed=3)
    lora_up = draw(128, 16, dtype=torch.bfloat16, seed=4)

    def run(forget):
        h = elementwise.silu_mul(gate, up)
        memory = StorageWeakRef(h.untyped_storage())
        recompute = (lambda: elementwise.silu_mul(gate, up)) if forget else None
        if recompute is None:
            y = ops.lora_linear(h, weight, None, down, lora_up, 1.0)
        else:
            with elementwise.recompute_instead_of_saving(h, recompute):
                y = ops.lora_linear(h, weight, None, down, lora_up, 1.0)
        del h
        assert memory.expired() == forget
        return torch.autograd.grad(y.float().square().sum(), [gate, up, down, lora_up])

    assert all(torch.equal(one, other) for one, other in zip(run(True), run(False), strict=True))


def test_opcheck_on_the_card():
    x, weight = draw(2, 3, 8, dtype=torch.float32), draw(8, dtype=torch.float32, seed=1).detach()
    q, k = draw(2, 3, 5, 8, dtype=torch.float32), draw(2, 1, 5, 8, dtype=torch.float32)
    cos, sin = (draw(1, 5, 6, dtype=torch.float32, seed=7).detach() for _ in range(2))
    for name, arguments in [
        ("rms_norm_forward", (x, weight, 1e-5, 0.0)),
        ("silu_mul", (x, draw(2, 3, 8, dtype=torch.float32, seed=1))),
        ("gelu_mul", (x, draw(2, 3, 8, dtype=torch.float32, seed=1))),
        ("rope", (q, k, cos, sin)),
    ]:
        torch.library.opcheck(getattr(torch.ops.zerolora, name).default, arguments)


def test_bad_input_names_the_values():
    x = torch.zeros(2, 8, device="cuda")
    for call, message in [
        (lambda: elementwise.rms_norm(x, torch.ones(4, device="cuda"), 1e-5), r"\(4,\).*\(2, 8\)"),
        (lambda: elementwise.rms_norm(x, torch.ones(8, device="cuda").bfloat16(), 1e-5), "BFloat16"),
        (
            lambda: elementwise.rms_norm(torch.zeros(1, 2**17, device="cuda"), torch.ones(2**17, device="cuda"), 1e-5),
            "131072",
        ),
        (lambda: elementwise.silu_mul(x, torch.zeros(2, 4, device="cuda")), r"\(2, 8\).*\(2, 4\)"),
        (lambda: elementwise.silu_mul(x.double(), x.double()), "Double"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
