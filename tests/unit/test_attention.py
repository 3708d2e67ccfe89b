"""Our variable-length attention where there are no bounds: it generates what transformers' sdpa does, without masks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from trainer.attention import VARLEN, _register, varlen_attention

WINDOW = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mistral without and one with a sliding window."""
    folder = tmp_path_factory.mktemp("attention")
    sizes = dict(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    for window in (None, WINDOW):
        torch.manual_seed(0)
        config = MistralConfig(**sizes, sliding_window=window, pad_token_id=0, eos_token_id=None, bos_token_id=None)
        MistralForCausalLM(config).save_pretrained(folder / str(window))
    _register()
    return folder


def load(folder: Path, window: int | None, attention: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder / str(window), attn_implementation=attention)
    # Weights this small would make every token as likely as any other, whatever attention sees.
    for parameter in model.parameters():
        parameter.data *= 8.0 if parameter.dim() > 1 else 1.0
    return model.eval()


def generated(model: Any, prompt: int, *, cached: bool) -> Any:
    ids = torch.randint(1, 64, (1, prompt), generator=torch.Generator().manual_seed(1))
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, use_cache=cached,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("prompt", [1, 5, 17])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_it_generates_what_sdpa_does(folder: Path, window: int | None, prompt: int, cached: bool) -> None:
    ours, theirs = (generated(load(folder, window, name), prompt, cached=cached) for name in (VARLEN, "sdpa"))
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    # In 32 bits: the window is a mask here and bounds there, and the sums are taken in another order.
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), atol=2e-6, rtol=1e-6)


def test_the_window_matters_here(folder: Path) -> None:
    narrow, wide = (generated(load(folder, window, VARLEN), 17, cached=True) for window in (WINDOW, None))
    assert not torch.allclose(narrow.logits[0], wide.logits[0], atol=1e-2)


@pytest.mark.parametrize("make", [create_causal_mask, create_sliding_window_causal_mask])
def test_transformers_builds_no_mask_for_packed_documents(folder: Path, make: Any) -> None:
    config = load(folder, WINDOW, VARLEN).config
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    assert make(config, torch.zeros(1, 8, 32), None, past_key_values=None, position_ids=positions) is None


def test_documents_of_equal_lengths_drop_what_the_model_asks_for() -> None:
    """A model with attention dropout is trained with it, packed or not: some weights are 0, the others doubled."""
    query = torch.zeros(1, 1, 8, 8)  # every key weighs the same, 1 / (t + 1) at position t
    value = torch.eye(8)[None, None]
    bounds = torch.tensor([0, 8], dtype=torch.int32)
    module = torch.nn.Module()
    kept, _ = varlen_attention(module, query, query, value, None, cu_seqlens=bounds, max_seqlen=8)
    torch.manual_seed(0)
    some, _ = varlen_attention(module, query, query, value, None, cu_seqlens=bounds, max_seqlen=8, dropout=0.5)
    share = (some / kept).nan_to_num()  # [1, T, heads, head_dim]: 1 / kept share, or 0
    assert set(share.flatten().round(decimals=4).tolist()) == {0.0, 2.0}
