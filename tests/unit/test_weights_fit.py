"""Every family's own checkpoint is taken for whole, and with one tensor less, whatever it is fused to, is not."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.test_architectures import MODELS, SMALL
from tests.distributed.test_families import FAMILIES, NOT_PACKED
from tests.multimodal import MULTIMODAL, make_multimodal
from trainer.config import ModelSection, UserError
from trainer.model.base import check_weights, load_model_config

MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", {"num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 32}),
    "gemma3n_text": (
        "gemma3n_text",
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "intermediate_size": [128] * 4,
            "head_dim": 16,
            "vocab_size_per_layer_input": 384,
            "hidden_size_per_layer_input": 8,
        },
    ),
}
ALL: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {"num_hidden_layers": 2, **changes}) for name, changes in (FAMILIES | NOT_PACKED).items()},
    **{f"{name}-shape": model for name, model in MODELS.items()},
    **MORE,
}


def save(folder: Path, name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    if name in MULTIMODAL:
        make_multimodal(folder, name)
        return
    model_type, settings = ALL[name]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SMALL | settings))).save_pretrained(folder)


def check(folder: Path) -> list[str]:
    return check_weights(str(folder), ModelSection(), load_model_config(str(folder), ModelSection()))


def changed(folder: Path, change: Any) -> None:
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", [*ALL, *MULTIMODAL])
def test_a_whole_checkpoint_is_whole_and_one_with_a_tensor_less_is_not(name: str, tmp_path: Path) -> None:
    save(tmp_path, name)
    assert check(tmp_path) == []
    stored = load_file(tmp_path / "model.safetensors")
    # A norm, a projection, one expert's weight: the last tensor of each kind.
    kinds = {re.sub(r"\d+", "N", tensor): tensor for tensor in stored if "position_ids" not in tensor}
    first, *_, last = kinds.values()
    for tensor in {first, last, *(tensor for tensor in kinds.values() if "expert" in tensor)}:
        save_file({key: value for key, value in stored.items() if key != tensor}, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=r"are missing|do not (fit|match)"):
            check(tmp_path)


@pytest.mark.parametrize("prefix", ["", "model.", "base.model."])
def test_the_prefix_of_the_inner_model_may_be_missing(prefix: str, tmp_path: Path) -> None:
    """As transformers loads it: without `model.` yes, with another one no."""
    save(tmp_path, "tied")

    def rename(stored: dict[str, torch.Tensor]) -> None:
        for name in [*stored]:
            stored[prefix + name.removeprefix("model.")] = stored.pop(name)

    changed(tmp_path, rename)
    if prefix != "base.model.":
        assert check(tmp_path) == []
        return
    with pytest.raises(UserError, match=r"20 of the 21 weights|would be random"):
        check(tmp_path)


def test_what_transformers_leaves_out_by_rule_is_not_said_and_the_rest_is(tmp_path: Path) -> None:
    save(tmp_path, "tied")
    changed(tmp_path, lambda stored: stored.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert check(tmp_path) == []
    changed(tmp_path, lambda stored: stored.update({"score.weight": torch.ones(2, 64), "score.bias": torch.ones(2)}))
    assert check(tmp_path) == ["2 stored tensors are not part of LlamaForCausalLM and are ignored (first: score.bias)"]


@pytest.mark.parametrize(("predicts", "layers", "refused"), [(0, 1, True), (1, 1, False), (1, 2, True)])
def test_layers_beyond_the_last_are_refused_unless_they_predict_later_tokens(
    predicts: int, layers: int, refused: bool, tmp_path: Path
) -> None:
    save(tmp_path, "glm4")
    config = load_model_config(str(tmp_path), ModelSection())
    config.num_nextn_predict_layers = predicts
    config.save_pretrained(tmp_path)

    def more(stored: dict[str, torch.Tensor]) -> None:
        for layer in range(2, 2 + layers):
            stored[f"model.layers.{layer}.mlp.down_proj.weight"] = torch.ones(64, 128)

    changed(tmp_path, more)
    if not refused:
        assert len(check(tmp_path)) == 1
        return
    with pytest.raises(UserError, match=f"describes 2 layers in model.layers, but the files have {layers} more"):
        check(tmp_path)
