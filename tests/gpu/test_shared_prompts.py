"""Pairs that share their prompt on a real GPU: flash attention reads the prompt's keys for both answers."""

import random
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from ops.head import LOSS
from tests.unit.test_packing_probe import LLAMA, model_of
from tests.unit.test_shared_prompts import pair
from trainer.data.batches import collate_samples
from trainer.data.samples import join_samples
from trainer.data.shared_prompts import build_shared_key_arguments
from trainer.patches.loss_head import TokenLoss
from trainer.patches.packed_attention import VARLEN, use_varlen_if_supported, varlen_attention
from trainer.patches.packing_probe import share_prompt_keys

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@pytest.mark.parametrize("window", [None, 64])
def test_flash_attention_reads_the_keys_of_the_prompt(window: int | None) -> None:
    """Output and gradients against 32-bit attention with an explicit mask."""
    lengths, shared = [300, 17, 128, 1, 200, 333], [0, 150, 0, 100, 0, 0]
    tokens, generator = sum(lengths), torch.Generator("cuda").manual_seed(0)
    leaves = [torch.randn(1, heads, tokens, 128, device=CUDA, generator=generator) for heads in (8, 2, 2)]
    grad = torch.randn(1, tokens, 8, 128, device=CUDA, generator=generator)
    keys = {
        key: value.cuda() if torch.is_tensor(value) else value
        for key, value in build_shared_key_arguments(lengths, shared).items()
    }
    bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)

    mask = torch.zeros(tokens, tokens, dtype=torch.bool, device=CUDA)
    for number, (length, common) in enumerate(zip(lengths, shared, strict=True)):
        own, before = int(bounds[number]), int(bounds[max(0, number - 1)])
        columns = torch.tensor([*range(before, before + common), *range(own, own + length)], device=CUDA)
        places = torch.arange(common + length, device=CUDA)
        back = places[common:, None] - places
        mask[own : own + length, columns] = (back >= 0) & (back < (window or tokens))
    whole = q, k, v = [leaf.clone().requires_grad_() for leaf in leaves]
    wanted = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    expected = [wanted.detach(), *torch.autograd.grad(wanted, whole, grad)]

    narrow = q, k, v = [leaf.bfloat16().requires_grad_() for leaf in leaves]
    hints: dict[str, Any] = {"cu_seqlens": bounds.cuda(), "max_seqlen": max(lengths), "sliding_window": window, **keys}
    out, _ = varlen_attention(torch.nn.Module(), q, k, v, None, **hints)
    found = [out.detach(), *torch.autograd.grad(out, narrow, grad.bfloat16())]
    for got, exact in zip(found, expected, strict=True):
        assert relative_error(got, exact) < 1e-2


@pytest.mark.parametrize(("name", "more"), [("llama", {}), ("mistral", {"sliding_window": 64})])
def test_losses_are_those_of_pairs_alone(name: str, more: dict[str, Any]) -> None:
    """In bf16 both forms differ from 32 bits by rounding only."""
    draw = random.Random(0)
    samples = [join_samples([pair(draw, 90, 40, 71), pair(draw, 1, 30, 20)]), pair(draw, 140, 1, 1)]
    settings = LLAMA | {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 512} | more
    exact = model_of(name, **settings).to(CUDA)
    for parameter in exact.parameters():  # so that attention matters
        parameter.data *= 4.0 if parameter.dim() > 1 else 1.0
    model = model_of(name, torch.bfloat16, **settings).to(CUDA)
    model.load_state_dict(exact.state_dict())
    use_varlen_if_supported(model, CUDA, torch.bfloat16)
    assert share_prompt_keys(TokenLoss(model), model, 0, CUDA) is None
    assert model.config._attn_implementation == VARLEN

    def losses(model: Any, *, flat: bool, shared: bool = False) -> torch.Tensor:
        batch = collate_samples(samples, 0, packed=True, flat=flat, pairs=True, shared=shared)
        return TokenLoss(model).measure_by_token(model, batch, CUDA)[LOSS]

    with torch.no_grad():
        expected = losses(exact, flat=False)
        alone, together = losses(model, flat=True), losses(model, flat=True, shared=True)
    assert relative_error(alone, expected) < 3e-2
    assert relative_error(together, expected) < 1.5 * relative_error(alone, expected) + 1e-3
