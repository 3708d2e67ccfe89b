"""`base_model: random:SHAPE`: true shapes without a download, the same weights every time, a byte-level tokenizer."""

from typing import Any

import pytest
import torch

from trainer.config import ModelSection, QuantizationSection, UserError
from trainer.model.base import build_empty_model, get_context_length, load_base_model, load_model_config, load_tokenizer
from trainer.model.published_shapes import find_shape, load_shapes

CPU = torch.device("cpu")
# Parameters of the published models, from the sizes of their weights.
PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "tinyllama-1.1b": 1_100_048_384,
    "llama2-7b": 6_738_415_616,
    "llama3.1-8b": 8_030_261_248,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-7b": 7_615_616_512,
    "gemma2-2b": 2_614_341_888,
    "phi3-mini": 3_821_079_552,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "olmoe-1b-7b": 6_919_161_856,
}


def load(name: str, **settings: Any) -> Any:
    return load_base_model(name, ModelSection(), dtype=torch.float32, device=CPU, attention="sdpa", **settings)


@pytest.mark.parametrize("shape", load_shapes())
def test_a_shape_has_the_parameters_of_the_published_model(shape: str) -> None:
    config = load_model_config(f"random:{shape}", ModelSection())
    model = build_empty_model(config, ModelSection())
    model.tie_weights()
    count = sum(parameter.numel() for parameter in model.parameters())
    if shape in PARAMETERS:
        assert count == PARAMETERS[shape]
    elif shape == "granite-4.0-h-1b":
        assert 1.4e9 < count < 1.5e9
        mamba = [name for name, _ in model.named_modules() if name.endswith(".mamba")]
        assert len(mamba) == 36
    length = get_context_length(config)
    assert length is not None and length >= 2048


def test_the_same_name_gives_the_same_weights_and_another_name_others() -> None:
    first, again, other = load("random:tiny"), load("random:tiny"), load("random:tiny,num_hidden_layers=3")
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert len(other.model.layers) == 3
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_matrices_are_drawn_and_norms_are_one() -> None:
    model = load("random:tiny,hidden_size=256,attention_bias=true")
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert abs(weight.mean().item()) < 1e-3
    assert bool((model.model.norm.weight == 1).all())
    assert not model.model.layers[0].self_attn.q_proj.bias.any()
    assert not any(value.is_meta for value in model.state_dict().values())


def test_tied_weights_stay_one_parameter() -> None:
    model = load("random:tiny,tie_word_embeddings=true")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_quantised_one_is_that_of_full_precision_in_4_bits() -> None:
    from trainer.model.four_bit import FrozenLinear4bit, dequantize_weight

    whole, packed = load("random:tiny"), load("random:tiny", quantization=QuantizationSection())
    layer = packed.model.layers[1].mlp.down_proj
    assert isinstance(layer, FrozenLinear4bit)
    expected = whole.model.layers[1].mlp.down_proj.weight
    torch.testing.assert_close(
        dequantize_weight(layer.weight, layer.quant_state, torch.float32), expected, atol=0.02, rtol=0
    )
    assert torch.equal(packed.lm_head.weight, whole.lm_head.weight)


def test_the_tokenizer_takes_any_text_and_chats() -> None:
    tokenizer = load_tokenizer("random:tiny", ModelSection())
    assert len(tokenizer) == 259
    text = "naïve\n\tçà 漢字 🙂"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert tokenizer(chat)["input_ids"][0] == tokenizer.convert_tokens_to_ids("<|im_start|>")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("random:llama9", "unknown shape; use random:SHAPE with one of tiny, smollm2-135m"),
        ("random:", "unknown shape"),
        ("random:tiny,layers", "'layers' must be key=value"),
        ("random:tiny,layers=3", "layers is not a setting of llama configurations"),
    ],
)
def test_a_mistake_is_one_line(name: str, problem: str) -> None:
    with pytest.raises(UserError, match="base_model=random:") as caught:
        load_model_config(name, ModelSection())
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3.1-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama2-7b"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
        ("ibm-granite/granite-4.0-h-1b", "granite-4.0-h-1b"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi3-mini"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("random:tiny", "tiny"),
        ("runs/merged", None),
    ],
)
def test_a_model_is_known_by_its_name(name: str, shape: str | None) -> None:
    assert find_shape(name) == shape


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("num_hidden_layers=x", "num_hidden_layers=x must be a number, such as 32"),
        ("num_hidden_layers=-1", "num_hidden_layers=-1 must be a whole number from 1 to 1,000"),
        ("vocab_size=1e12", "must be a whole number from 1 to 10,000,000"),
        ("num_hidden_layers=true", "must be a number"),
        ("num_hidden_layers=", "num_hidden_layers=None must be a number"),
        ("hidden_size=65", "not a multiple of the number of attention heads"),
        ("num_attention_heads=0", "must be a whole number from 1"),
        ("num_key_value_heads=3", "num_key_value_heads=3 must divide 4 heads"),
        ("rope_theta=x", "rope_theta=x must be a number"),
        ("rope_scaling=x", "rope_parameters"),
        ("dtype=foo", "foo"),
    ],
)
def test_a_setting_of_a_shape_that_cannot_be_is_one_line(change: str, line: str) -> None:
    with pytest.raises(UserError) as refused:
        load_model_config(f"random:tiny,{change}", ModelSection())
    assert str(refused.value).startswith(f"base_model=random:tiny,{change}: ") and line in str(refused.value)
    assert len(load("random:tiny,num_hidden_layers=3e0").model.layers) == 3


@pytest.mark.parametrize("layers", [2, 6, 45])
def test_another_number_of_layers_keeps_the_pattern_of_their_kinds(layers: int) -> None:
    whole = load_model_config("random:granite-4.0-h-1b", ModelSection()).layer_types
    assert len(whole) == 40
    config = load_model_config(f"random:granite-4.0-h-1b,num_hidden_layers={layers}", ModelSection())
    assert config.layer_types == (whole + whole)[:layers]
