"""What a model really does with packed documents is seen before training, whatever its configuration says."""

from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from trainer.config import UserError
from trainer.patches.loss_head import TokenLoss
from trainer.patches.packed_attention import VARLEN, use_varlen_if_supported
from trainer.patches.packing_probe import check_causal, separate_documents

CPU = torch.device("cpu")
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
LLAMA: dict[str, Any] = {"intermediate_size": 48, "num_key_value_heads": 2}
EXPERTS = LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64}


def model_of(model_type: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SIZES | settings))).to(dtype)


def flat_packs(model: Any) -> bool:
    return separate_documents(TokenLoss(model), model, 0, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", LLAMA),
        ("mixtral", EXPERTS),
        ("gpt_neox", {"intermediate_size": 48}),
        ("gpt2", {"n_inner": 48}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ],
)
def test_most_models_keep_documents_apart(name: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    assert not flat_packs(model_of(name, dtype, **settings))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("opt", OPT),
        ("bloom", {}),
        ("gpt_oss", EXPERTS | {"head_dim": 8}),
    ],
)
def test_models_that_ignore_positions_are_refused(name: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    model = model_of(name, dtype, **settings).train()
    line = f"dataset.packing=true: in {type(model).__name__} documents of a pack attend to each other; set dataset"
    with pytest.raises(UserError, match=line):
        flat_packs(model)
    assert model.training


def test_attention_that_looks_ahead_is_refused() -> None:
    def looks_ahead(module: Any, query: torch.Tensor, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        key, value = (heads.repeat_interleave(query.shape[1] // key.shape[1], 1) for heads in (key, value))
        return torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2), None

    AttentionInterface.register("looks_ahead", looks_ahead)
    model = model_of("llama", **LLAMA)
    model.set_attn_implementation("looks_ahead")
    with pytest.raises(UserError, match="in LlamaForCausalLM tokens attend to later tokens"):
        flat_packs(model)


@pytest.mark.parametrize(
    ("name", "settings"), [("bert", {"intermediate_size": 48}), ("xlnet", {"d_model": 32, "n_head": 4, "n_layer": 2})]
)
def test_a_model_that_reads_in_both_directions_is_refused(name: str, settings: dict[str, Any]) -> None:
    model = model_of(name, **settings).train()
    with pytest.raises(UserError, match=f"base_model=m: in {type(model).__name__} tokens attend to later tokens"):
        check_causal(TokenLoss(model), model, 0, CPU, "m")
    assert model.training


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bert", {"intermediate_size": 48, "is_decoder": True}),
        ("llama", LLAMA),
        ("mixtral", EXPERTS),
        ("opt", OPT),
        ("bloom", {}),
        ("mamba", {"state_size": 8}),
    ],
)
def test_causal_models_are_not(name: str, settings: dict[str, Any]) -> None:
    model = model_of(name, **settings)
    check_causal(TokenLoss(model), model, 0, CPU, "m")


def test_a_model_that_drops_the_bounds_gets_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nemotron's code hands attention no more than it knows itself: our kernels would take a row for one document."""
    monkeypatch.setattr("trainer.patches.packed_attention.has_flash", lambda device, dtype: True)
    model = model_of("nemotron", intermediate_size=48, num_key_value_heads=2)
    use_varlen_if_supported(model, CPU, torch.float32)
    assert model.config._attn_implementation == VARLEN
    assert not flat_packs(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("name", "settings"), [("falcon", {}), ("gemma2", LLAMA | {"head_dim": 8})])
def test_models_with_attention_of_their_own_keep_it(
    name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.patches.packed_attention.has_flash", lambda device, dtype: True)
    model = model_of(name, **settings)
    use_varlen_if_supported(model, CPU, torch.float32)
    assert model.config._attn_implementation in ("sdpa", "eager")
