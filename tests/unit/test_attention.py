"""Our variable-length attention where there are no bounds: it generates what transformers' sdpa does, without masks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from trainer.config import ModelSection, UserError
from trainer.model.base import load_base_model
from trainer.patches.packed_attention import (
    VARLEN,
    attend_with_repeated_heads,
    check_attention_supported,
    choose_attention,
    copy_heads_without_flash,
    enable_varlen,
    mask_padding,
    register_repeated_heads_attention,
    varlen_attention,
)
from trainer.setup.joining import disable_cudnn_attention

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
    enable_varlen(load(folder, None, "sdpa"))  # registers our attention
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


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_padded_batch_generates_what_each_row_does(folder: Path, window: int | None) -> None:
    model, options = load(folder, window, VARLEN), {"max_new_tokens": 8, "do_sample": False}
    rows = [torch.randint(1, 64, (length,)) for length in (3, 9, 20)]
    alone = [model.generate(row[None], attention_mask=torch.ones_like(row[None]), **options)[0, -8:] for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
    with mask_padding(model):
        assert model.config._attn_implementation == "sdpa"
        batch = model.generate(ids, attention_mask=(ids != 0).long(), **options)[:, -8:]
    assert model.config._attn_implementation == VARLEN
    assert torch.equal(batch, torch.stack(alone))


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


class AtAttention(TorchFunctionMode):
    """Whether cuDNN may compute each attention of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed: list[bool] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return function(*args, **(kwargs or {}))


def test_cudnn_is_left_to_whole_tiles(folder: Path) -> None:
    """Not with a mask, and not where a document ends within 128 tokens: pytorch#196678."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        disable_cudnn_attention()
        with AtAttention() as seen:
            for length in (128, 192):
                query = torch.zeros(1, 1, 2 * length, 8)
                bounds = torch.tensor([0, length, 2 * length], dtype=torch.int32)
                varlen_attention(torch.nn.Module(), query, query, query, None, cu_seqlens=bounds, max_seqlen=length)
            load(folder, None, "sdpa")(input_ids=torch.ones(1, 128, dtype=torch.long))
        assert seen.allowed == [True, False, False, False]  # the model has two layers
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.fixture
def own_heads() -> Iterator[None]:
    yield register_repeated_heads_attention()
    AttentionInterface.register("sdpa", sdpa_attention_forward)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_copied_heads_give_the_same_logits_and_gradients(
    folder: Path, window: int | None, packed: bool, own_heads: None
) -> None:
    positions = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]])} if packed else {}
    ids = torch.arange(1, 13)[None]
    seen = []
    for attention in (attend_with_repeated_heads, sdpa_attention_forward):
        AttentionInterface.register("sdpa", attention)
        model = load(folder, window, "sdpa")
        logits = model(input_ids=ids, use_cache=False, **positions).logits
        logits.square().mean().backward()
        seen.append((logits, model.model.layers[0].self_attn.k_proj.weight.grad))
    (logits, gradient), (expected, of_expected) = seen
    assert torch.equal(logits, expected)
    # Without a mask torch adds up the gradients of shared heads, in 32 bits and another order; with one both copy.
    atol = 5e-8 if window is None and not packed else 0.0
    torch.testing.assert_close(gradient, of_expected, atol=atol, rtol=0)


def test_copied_heads_are_not_left_to_torch(own_heads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU without flash attention torch would take plain products for heads that it has to share."""
    seen = []
    torchs = torch.nn.functional.scaled_dot_product_attention

    def spied(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any) -> torch.Tensor:
        seen.append((key.shape[1], value.shape[1], settings.get("enable_gqa", False)))
        return torchs(query, key, value, **settings)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spied)
    module = torch.nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    query, key = torch.rand(1, 4, 8, 16), torch.rand(1, 2, 8, 16)
    outs = [
        attention(module, query, key, key, None)[0]
        for attention in (attend_with_repeated_heads, sdpa_attention_forward)
    ]
    torch.testing.assert_close(*outs)
    assert seen == [(4, 4, False), (2, 2, True)]


def test_copied_heads_leave_a_graph_whole() -> None:
    """With training.torch_compile."""
    module = torch.nn.Module()
    query, key = torch.rand(1, 4, 8, 16), torch.rand(1, 2, 8, 16)

    def attend(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return attend_with_repeated_heads(module, query, key, key, None)[0]

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(query, key), attend(query, key))


@pytest.mark.parametrize(
    ("capability", "dtype", "own"),
    [
        ((9, 0), torch.bfloat16, False),
        ((9, 0), torch.float32, True),
        ((7, 5), torch.float16, True),
        ((8, 0), torch.float16, False),
    ],
)
def test_without_flash_attention_sdpa_has_own_heads(
    capability: tuple[int, int], dtype: torch.dtype, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    try:
        copy_heads_without_flash(torch.device("cuda"), dtype)
        assert (AttentionInterface()["sdpa"] is attend_with_repeated_heads) == own
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)


def test_auto_is_eager_where_the_model_knows_nothing_else(folder: Path) -> None:
    sizes = dict(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    Gemma2ForCausalLM(Gemma2Config(**sizes)).save_pretrained(folder / "gemma2")
    device, dtype = torch.device("cpu"), torch.float32
    attention = choose_attention(ModelSection())
    model = load_base_model(str(folder / "gemma2"), ModelSection(), dtype=dtype, device=device, attention=attention)
    assert model.config._attn_implementation == "eager"
    with pytest.raises(UserError, match=r"model.attn_implementation=sdpa: Gemma2ForCausalLM does not support it; use"):
        check_attention_supported(ModelSection(attn_implementation="sdpa"), model)
    check_attention_supported(ModelSection(attn_implementation="eager"), model)
