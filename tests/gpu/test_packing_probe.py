"""Packed documents on a real GPU: our kernels keep them apart, and models that ignore their bounds get masks."""

from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.unit.test_packing_probe import LLAMA, model_of
from trainer.patches.loss_head import TokenLoss
from trainer.patches.packed_attention import VARLEN, register_repeated_heads_attention, use_varlen_if_supported
from trainer.patches.packing_probe import separate_documents

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


def flat_packs(model: Any) -> bool:
    use_varlen_if_supported(model, CUDA, model.dtype)
    return separate_documents(TokenLoss(model), model, 0, CUDA)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernels_keep_documents_apart(dtype: torch.dtype) -> None:
    model = model_of("llama", dtype, **LLAMA).to(CUDA)
    assert flat_packs(model)
    assert model.config._attn_implementation == VARLEN


def test_experts_are_not_mistaken_for_mixed_documents() -> None:
    settings = LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}
    assert flat_packs(model_of("mixtral", torch.bfloat16, **settings).to(CUDA))


def test_a_model_that_drops_the_bounds_gets_a_mask() -> None:
    model = model_of("nemotron", torch.bfloat16, intermediate_size=48, num_key_value_heads=2).to(CUDA)
    assert not flat_packs(model)
    assert model.config._attn_implementation == "sdpa"


def test_32_bits_have_masks_and_no_probabilities() -> None:
    """Shared heads in 32 bits: with torch's plain products a layer would keep heads x L x L numbers."""
    length, heads = 4096, 8
    model = model_of("llama", **LLAMA | {"num_attention_heads": heads, "max_position_embeddings": length}).to(CUDA)
    assert not flat_packs(model)
    tokens = torch.randint(64, (1, length), device=CUDA)

    def kept() -> int:
        before = torch.cuda.memory_allocated()
        logits = model(input_ids=tokens, use_cache=False).logits
        return torch.cuda.memory_allocated() - before - logits.nbytes

    probabilities = 2 * heads * length**2 * 4
    assert kept() > probabilities
    register_repeated_heads_attention()
    try:
        assert kept() < probabilities / 10
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)
