"""Packed attention on a card: documents of one length by dense kernels, others by flash attention, each one alone."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from trainer.patches.packed_attention import TOWER, use_flash_in_towers, varlen_attention

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


@pytest.mark.parametrize("width", [80, 72])
def test_an_image_tower_computes_its_windows_as_transformers_does(width: int) -> None:
    from transformers import AutoModelForMultimodalLM, Qwen2_5_VLConfig

    heads = 4
    vision = {
        "depth": 2, "hidden_size": heads * width, "intermediate_size": 64, "num_heads": heads, "out_hidden_size": 64,
        "window_size": 112, "fullatt_block_indexes": [1], "patch_size": 14,
    }  # fmt: skip
    text = {
        "vocab_size": 384, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(Qwen2_5_VLConfig(text_config=text, vision_config=vision)).cuda()
    tower = next(module for module in model.modules() if hasattr(module, "fullatt_block_indexes"))
    grid = torch.tensor([[1, 20, 12], [1, 8, 8]], device="cuda")  # windows of three sizes
    pixels = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 14 * 14, device="cuda")

    def run() -> list[torch.Tensor]:
        out = tower(pixels.to(tower.dtype), grid_thw=grid).last_hidden_state
        inner = tower.blocks[0].attn.qkv.weight
        return [out, *torch.autograd.grad(out.float().square().mean(), inner)]

    exact = run()
    model.bfloat16()
    use_flash_in_towers(model, torch.device("cuda"), torch.bfloat16)
    assert tower.config._attn_implementation == TOWER
    for got, wanted in zip(run(), exact, strict=True):
        error = (got.float() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
        assert error < 2e-2, error
