"""The element-wise operators in plain torch: derivatives, registration, and recomputation."""

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

import ops
from ops import elementwise

DOUBLE = torch.float64


def draw(*shape, dtype=DOUBLE, seed=0):
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers.to(dtype).requires_grad_()


def angles(T, R, B=1, dtype=DOUBLE):
    angle = draw(B, T, R, seed=9).detach()
    return angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_gradient_of_the_norm(offset):
    weight = draw(8, seed=1).detach()
    assert torch.autograd.gradcheck(lambda x: elementwise.rms_norm(x, weight, 1e-3, offset), draw(3, 5, 8))


def test_a_trained_weight_is_refused():
    y = elementwise.rms_norm(draw(3, 5, 8), draw(8, seed=1), 1e-3)
    with pytest.raises(ValueError, match="does not compute its gradient"):
        y.sum().backward()


@pytest.mark.parametrize("gated", [elementwise.silu_mul, elementwise.gelu_mul])
def test_gradient_of_a_gated_product(gated):
    assert torch.autograd.gradcheck(gated, (draw(3, 5, 8), draw(3, 5, 8, seed=1)))


@pytest.mark.parametrize("R", [6, 8])
@pytest.mark.parametrize("B", [1, 2])
def test_gradient_of_rope(R, B):
    # The two halves have angles of their own: the derivative is the transpose, not only the opposite turn.
    cos, sin = angles(5, R, B)
    inputs = draw(2, 3, 5, 8), draw(2, 1, 5, 8, seed=1)
    assert torch.autograd.gradcheck(lambda q, k: elementwise.rope(q, k, cos, sin), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_values_are_those_of_transformers(dtype):
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    x, weight = draw(3, 5, 32, dtype=dtype).detach(), draw(32, dtype=dtype, seed=1).detach()
    for module, offset in ((LlamaRMSNorm(32, 1e-5), 0.0), (GemmaRMSNorm(32, 1e-5), 1.0)):
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        assert torch.equal(elementwise.rms_norm(x, weight, 1e-5, offset), module(x))
    gate, up = draw(3, 5, 8, dtype=dtype).detach(), draw(3, 5, 8, dtype=dtype, seed=1).detach()
    assert torch.equal(elementwise.silu_mul(gate, up), F.silu(gate) * up)
    assert torch.equal(elementwise.gelu_mul(gate, up), F.gelu(gate, approximate="tanh") * up)
    cos, sin = (torch.cat([half, half], dim=-1) for half in angles(5, 4, dtype=dtype))
    q, k = (
        draw(2, 5, 3, 8, dtype=dtype).detach().transpose(1, 2),
        draw(2, 5, 1, 8, dtype=dtype).detach().transpose(1, 2),
    )
    for got, wanted in zip(elementwise.rope(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        # Ours rounds once where theirs rounds both products and the sum.
        torch.testing.assert_close(got, wanted, rtol=0, atol=3 * torch.finfo(dtype).eps * float(q.abs().max()))
        assert got.transpose(1, 2).is_contiguous()


OPERATORS = ("rms_norm_forward", "rms_norm_backward", "rope", "rope_backward")
GATED = ("silu_mul", "silu_mul_backward", "gelu_mul", "gelu_mul_backward")


@pytest.mark.parametrize("name", OPERATORS + GATED)
def test_opcheck(name):
    x, weight, grad = draw(2, 3, 8, dtype=torch.float32), draw(8, dtype=torch.float32).detach(), draw(2, 3, 8).float()
    q, k = draw(2, 3, 5, 8, dtype=torch.float32), draw(2, 1, 5, 8, dtype=torch.float32)
    cos, sin = angles(5, 6, dtype=torch.float32)
    arguments = {
        "rms_norm_forward": (x, weight, 1e-5, 0.0),
        "rms_norm_backward": (grad.detach(), x.detach(), weight, torch.rand(6), 1.0),
        "silu_mul": (x, draw(2, 3, 8, dtype=torch.float32, seed=1)),
        "silu_mul_backward": (grad.detach(), x.detach(), x.detach()),
        "gelu_mul": (x, draw(2, 3, 8, dtype=torch.float32, seed=1)),
        "gelu_mul_backward": (grad.detach(), x.detach(), x.detach()),
        "rope": (q, k, cos, sin),
        "rope_backward": (q.detach(), k.detach(), cos, sin),
    }[name]
    torch.library.opcheck(getattr(torch.ops.zerolora, name).default, arguments)


def test_bad_input_names_the_shapes():
    x = torch.zeros(2, 8)
    cos, sin = angles(5, 6, dtype=torch.float32)
    q = torch.zeros(2, 3, 5, 8)
    for call, message in [
        (lambda: elementwise.rms_norm(x, torch.ones(4), 1e-5), r"\(4,\).*\(2, 8\)"),
        (lambda: elementwise.rms_norm(x, torch.ones(8).bfloat16(), 1e-5), "bfloat16"),
        (lambda: elementwise.silu_mul(x, torch.zeros(2, 4)), r"\(2, 8\).*\(2, 4\)"),
        (lambda: elementwise.gelu_mul(x, torch.zeros(2, 4)), r"\(2, 8\).*\(2, 4\)"),
        (lambda: elementwise.rope(q, q[:1], cos, sin), r"\(1, 3, 5, 8\)"),
        (lambda: elementwise.rope(q, q, cos[:, :4], sin[:, :4]), r"\(1, 4, 6\)"),
        (lambda: elementwise.rope(q[..., :4], q[..., :4], cos, sin), "rotary width"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def consumer(kind):
    """A layer that reads h: PEFT's own way, or the fused operator."""
    weight, down, up = draw(4, 8, seed=2).detach(), draw(2, 8, seed=3), draw(4, 2, seed=4)
    if kind == "plain":
        return lambda h: F.linear(h, weight) + F.linear(F.linear(h, down), up), [down, up]
    return lambda h: ops.lora_linear(h, weight, None, down, up, 1.0), [down, up]


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_recomputing_saves_the_function_instead_of_the_result(kind):
    layer, factors = consumer(kind)
    gate, up = draw(3, 5, 8), draw(3, 5, 8, seed=1)
    wanted = torch.autograd.grad(layer(elementwise.silu_mul(gate, up)).square().sum(), [gate, up, *factors])
    recomputed = []

    def recompute():
        recomputed.append(1)
        return elementwise.silu_mul(gate, up)

    h = elementwise.silu_mul(gate, up)
    memory = StorageWeakRef(h.untyped_storage())
    with elementwise.recompute_instead_of_saving(h, recompute):
        y = layer(h)
    del h
    assert memory.expired()
    got = torch.autograd.grad(y.square().sum(), [gate, up, *factors])
    assert recomputed
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)


def test_recomputing_leaves_other_tensors_alone():
    x, other = draw(3, 8), draw(3, 8, seed=1)
    with elementwise.recompute_instead_of_saving(x, lambda: pytest.fail("recomputed without need")):
        y = other.exp()
    assert torch.equal(torch.autograd.grad(y.sum(), other)[0], other.exp())
