"""Dropout in the CUDA operators, on a card: one mask in all passes, drawn once where it can be, new in every replay."""

import pytest
import torch

import ops
from ops import reference
from tests.numerics import cases

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]
TYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("T", "width", "out", "rank"), [(513, 1024, 512, 16), (257, 520, 264, 64), (100, 77, 129, 5)])
def test_dropout_uses_the_reference_mask_forward_and_backward(T, width, out, rank, dtype):
    cases.check(cases.make(T, width, out, rank, dtype, "cuda", p=0.1, bias=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("T", "width", "out", "rank"),
    [(513, 1024, 512, 16), (257, 520, 264, 64), (2047, 392, 128, 32), (4097, 1032, 64, 200), (8192, 4096, 256, 16)],
)
def test_the_mask_that_da_leaves_is_the_mask_that_is_drawn(T, width, out, rank, dtype):
    """dA draws the mask, and leaves its bits if dX is wanted, which takes them; without dA, dX draws it."""
    c = cases.make(T, width, out, rank, dtype, "cuda", p=0.1)
    adapter = [c.weight], [c.down], [c.up]
    _, h = torch.ops.zerolora.lora_forward(c.x, [c.weight], [], *adapter[1:], [c.scale], c.p, c.seed, None)
    args = [c.grad], c.x, *adapter, h, [c.scale], c.p, c.seed
    grad_x, (grad_down,), _ = torch.ops.zerolora.lora_backward(*args, True, True, True)
    drawn_x, _, _ = torch.ops.zerolora.lora_backward(*args, True, False, True)
    _, (drawn_down,), _ = torch.ops.zerolora.lora_backward(*args, False, True, True)
    assert torch.equal(grad_down, drawn_down)
    assert T >= 4096 or torch.equal(grad_x, drawn_x)  # from there on without bits another kernel makes dX


@pytest.mark.parametrize("T", [300, 4200])
def test_dropout_with_an_adapter_at_an_odd_address(T):
    """A lies two bytes beyond an aligned address, as in a flat buffer: the masked dh A reads it where it lies."""
    problem = cases.make(T, 512, 384, 16, torch.bfloat16, "cuda", p=0.1)
    flat = torch.empty(problem.down.numel() + 1, device="cuda", dtype=torch.bfloat16)
    problem.down = flat[1:].view(problem.down.shape).copy_(problem.down)
    cases.check(problem)


def test_keep_rate_and_mask_bits():
    T, width, p = 4096, 1024, 0.1
    z, eye = torch.ones(T, width, device="cuda").bfloat16(), torch.eye(width, device="cuda")[:64].bfloat16()
    seed = torch.tensor([42], device="cuda")
    u, _ = torch.ops.zerolora.rank_pass(z, eye, None, p, seed)
    mask = reference.build_dropout_mask(seed, T, width, p, torch.float32)
    assert torch.equal(u, mask[:, :64].bfloat16())
    kept = float((mask > 0).double().mean())
    assert abs(kept - (1 - p)) < 4 * (p * (1 - p) / mask.numel()) ** 0.5


def test_graph_replay_draws_a_new_mask_each_time():
    problem = cases.make(256, 512, 384, 16, torch.bfloat16, "cuda")
    args = problem.weight, None, problem.down, problem.up, 1.0, 0.5
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ops.lora_linear(problem.x, *args)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.lora_linear(problem.x, *args)
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(y, first)
    assert bool(torch.isfinite(y).all())
