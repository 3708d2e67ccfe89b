"""Published shapes without their weights: which layers `all-linear` adapts, and what is said of the rest."""

from typing import Any

import pytest
import torch

from trainer.config import LoraSection, ModelSection, UserError
from trainer.model.adapter import apply_adapter, summarize_adapted_layers
from trainer.model.base import build_empty_model
from trainer.model.random_weights import build_random_config
from trainer.patches.mamba import check_quantizable, describe_unadapted_weights

# name, in -> out, layers
SHAPES: dict[str, list[tuple[str, str, int]]] = {
    "granite-4.0-h-1b": [
        ("input_linear", "1536 -> 8192", 40),
        ("output_linear", "4096 -> 1536", 40),
        ("in_proj", "1536 -> 6448", 36),
        ("out_proj", "3072 -> 1536", 36),
        ("q_proj", "1536 -> 1536", 4),
        ("k_proj", "1536 -> 512", 4),
        ("v_proj", "1536 -> 512", 4),
        ("o_proj", "1536 -> 1536", 4),
    ],
    "qwen2.5-7b": [
        ("q_proj", "3584 -> 3584", 28),
        ("k_proj", "3584 -> 512", 28),
        ("v_proj", "3584 -> 512", 28),
        ("o_proj", "3584 -> 3584", 28),
        ("gate_proj", "3584 -> 18944", 28),
        ("up_proj", "3584 -> 18944", 28),
        ("down_proj", "18944 -> 3584", 28),
    ],
    "phi3-mini": [
        ("qkv_proj", "3072 -> 9216", 32),
        ("o_proj", "3072 -> 3072", 32),
        ("gate_up_proj", "3072 -> 16384", 32),
        ("down_proj", "8192 -> 3072", 32),
    ],
}


def adapted(shape: str) -> Any:
    model = build_empty_model(build_random_config(f"random:{shape}"), ModelSection())
    return apply_adapter(model, LoraSection(r=8), torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_linear_layer_of_a_published_shape_is_adapted(shape: str) -> None:
    model = adapted(shape)
    assert {(layer.name, layer.shape, layer.count) for layer in summarize_adapted_layers(model)} == set(SHAPES[shape])
    for layer in summarize_adapted_layers(model):
        sides = sum(map(int, layer.shape.split(" -> ")))
        assert layer.parameters == 8 * sides * layer.count


def test_a_hybrids_convolutions_are_said_to_have_no_adapter() -> None:
    [line] = describe_unadapted_weights(adapted("granite-4.0-h-1b"))
    assert line == "without adapter (not linear layers): conv1d (36 of 3328 x 1 x 4); 0.0% of all parameters"


@pytest.mark.parametrize("shape", ["qwen2.5-7b", "phi3-mini"])
def test_nothing_is_said_of_models_of_linear_layers_alone(shape: str) -> None:
    assert describe_unadapted_weights(adapted(shape)) == []


def test_experts_without_adapter_are_said_with_their_share() -> None:
    """Of Qwen2-MoE they are most of the model."""
    from transformers import AutoConfig

    config = AutoConfig.for_model("qwen2_moe", num_hidden_layers=2, num_experts=8, vocab_size=1000)
    model = apply_adapter(build_empty_model(config, ModelSection()), LoraSection(r=8, experts=False), torch.float32)
    [line] = describe_unadapted_weights(model)
    assert line.startswith("without adapter (not linear layers): ")
    assert "experts.gate_up_proj (2 of 8 x 2816 x 2048)" in line and "experts.down_proj (2 of 8 x 2048 x 1408)" in line
    total = sum(parameter.numel() for parameter in model.parameters())
    share = (2 * 8 * 3 * 1408 * 2048 + 2 * 8 * 2048) / total
    assert line.endswith(f"{share:.1%} of all parameters") and share > 0.5


def test_a_model_without_linear_layers_has_nothing_to_quantise() -> None:
    from transformers import AutoConfig

    line = "adapter=qlora: GPT2LMHeadModel has no linear layer to quantize; use adapter: lora"
    with pytest.raises(UserError, match=line):
        check_quantizable(build_empty_model(AutoConfig.for_model("gpt2"), ModelSection()))
    check_quantizable(build_empty_model(AutoConfig.for_model("falcon", num_hidden_layers=1), ModelSection()))
