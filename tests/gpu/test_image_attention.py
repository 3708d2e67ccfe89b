"""Attention at the shapes of image models on a card, by the kernels that training leaves to torch: right gradients."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from trainer.setup.joining import disable_cudnn_attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("tokens", "heads", "width"),
    [(4608, 24, 128), (4429, 24, 64), (1024, 20, 64)],
    ids=["flux-1024", "sd3.5-medium-1024", "sdxl-1024"],
)
def test_gradients_are_those_of_wider_numbers(tokens: int, heads: int, width: int) -> None:
    """cuDNN's kernels (torch 2.11, cuDNN 9.19, an H200) end the first in an illegal memory access, or in no numbers."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        disable_cudnn_attention()
        torch.manual_seed(0)
        # As diffusers has them: [B, T, heads, width] in memory.
        leaves = [torch.randn(1, tokens, heads, width, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        grad = torch.randn(1, heads, tokens, width, device="cuda", dtype=torch.bfloat16)
        found = derivatives(leaves, grad)
        expected = derivatives([each.float() for each in leaves], grad.float())
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    for got, wanted in zip(found, expected, strict=True):
        error = (got.float() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
        assert error < 2e-2, error


def derivatives(leaves: list[torch.Tensor], grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of the three inputs."""
    leaves = [each.requires_grad_() for each in leaves]
    query, key, value = (each.transpose(1, 2) for each in leaves)
    out = scaled_dot_product_attention(query, key, value)
    return torch.autograd.grad(out, leaves, grad)
