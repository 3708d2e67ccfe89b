"""Attention sinks by flash attention on a card, against plain torch in 64 bits: outputs and gradients."""

import math

import pytest
import torch

from trainer.patches.attention_sinks import attend_with_sinks

pytestmark = pytest.mark.gpu
HEADS, SHARED, WIDTH = 8, 2, 64
LENGTHS = (70, 1, 200, 129)


def in_plain_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, window: int | None
) -> torch.Tensor:
    outs, begin = [], 0
    for length in LENGTHS:
        rows = slice(begin, begin + length)
        own_k, own_v = (each[:, :, rows].repeat_interleave(HEADS // SHARED, 1) for each in (k, v))
        places = torch.arange(length, device=q.device)
        back = places[:, None] - places
        hidden = (back < 0) | (back >= (window or length))
        scores = (q[:, :, rows] @ own_k.mT / math.sqrt(WIDTH)).masked_fill(hidden, -torch.inf)
        with_sink = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, HEADS, length, 1)], dim=-1)
        outs.append((with_sink.softmax(-1)[..., :-1] @ own_v).transpose(1, 2))
        begin += length
    return torch.cat(outs, dim=1)


@pytest.mark.parametrize("window", [None, 32])
def test_outputs_and_gradients_are_those_of_the_softmax_with_its_sink(window: int | None) -> None:
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    q = torch.randn(1, HEADS, tokens, WIDTH, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, SHARED, tokens, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    sinks = torch.randn(HEADS, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(1, tokens, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    leaves = q, k, v, sinks = tuple(each.clone().requires_grad_() for each in (q, k, v, sinks))
    exact = tuple(each.detach().double().requires_grad_() for each in leaves)
    bounds = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    out = attend_with_sinks(q, k, v, sinks, bounds, max(LENGTHS), 1 / math.sqrt(WIDTH), window)
    truth = in_plain_torch(exact[0], exact[1], exact[2], exact[3], window)
    found = torch.autograd.grad(out, leaves, grad)
    expected = torch.autograd.grad(truth, exact, grad.double())
    for got, wanted in zip((out.detach(), *found), (truth.detach(), *expected), strict=True):
        error = (got.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
        assert error < 1e-2, error
