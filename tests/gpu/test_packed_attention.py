"""Packed attention on a card: documents of one length by dense kernels, others by flash attention, each one alone."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from trainer.patches.packed_attention import varlen_attention

pytestmark = pytest.mark.gpu


def one_by_one(
    leaves: list[torch.Tensor], lengths: list[int], grad: torch.Tensor, window: int | None = None
) -> list[torch.Tensor]:
    """Output [1, T, heads, head_dim] and derivatives of q, k, v, in the leaves' own numbers."""
    pieces = [leaf.split(lengths, 2) for leaf in leaves]
    found = [
        scaled_dot_product_attention(q, k, v, attn_mask=attention_mask(q.shape[2], window), enable_gqa=True)
        for q, k, v in zip(*pieces, strict=True)
    ]
    out = torch.cat(found, 2).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def attention_mask(length: int, window: int | None) -> torch.Tensor:
    """Return the keys [length, length] that each query attends to."""
    place = torch.arange(length, device="cuda")
    back = place[:, None] - place
    return (back >= 0) & (back < (window or length))


def drawn(tokens: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k and v, and the derivative of the output."""
    generator = torch.Generator("cuda").manual_seed(0)
    heads = (32, 8, 8)
    shapes = [(1, count, tokens, 128) for count in heads]
    leaves = [torch.randn(shape, device="cuda", generator=generator).requires_grad_() for shape in shapes]
    return leaves, torch.randn(1, tokens, heads[0], 128, device="cuda", generator=generator)


@pytest.mark.parametrize("lengths", [[2048] * 4, [2048] * 4 + [127] * 8, [512, 512, 300, 17], [300, 512, 17]])
def test_each_document_is_alone(lengths: list[int]) -> None:
    tokens = sum(lengths)
    leaves, grad = drawn(tokens)
    host = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    query, key, value = narrow = [leaf.detach().bfloat16().requires_grad_() for leaf in leaves]
    out, _ = varlen_attention(
        torch.nn.Module(), query, key, value, None, cu_seqlens=host.cuda(), max_seqlen=max(lengths)
    )
    found = [out.detach(), *torch.autograd.grad(out, narrow, grad.bfloat16())]
    for got, wanted in zip(found, one_by_one(leaves, lengths, grad), strict=True):
        error = (got.float() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
        assert error < 1e-2, error
