"""Layers that an adapter cannot learn on are left out of all-linear, listed with the reason, and refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import one_rank
from tests.families import FAMILIES, save_family, tiny_config, tiny_family
from tests.runs_in_process import make_ground, train
from trainer.config import LoraSection, ModelSection, QuantizationSection, TrainingSection, UserError, ZeroSection
from trainer.model.adapter import apply_adapter, summarize_adapted_layers
from trainer.model.base import build_empty_model, get_context_length, load_base_model
from trainer.model.expert_targets import find_expert_targets
from trainer.model.reached_layers import probe_gradient_coverage
from trainer.model.targets import check_targets, describe_unadapted_layers, find_layers_to_adapt
from trainer.parallel.engine.deepspeed_engine import build_deepspeed_config

NEVER, NO_GRADIENT, PEFT, CHOOSE = "never called", "no gradient", "PEFT does not adapt", "route tokens"
LEFT_OUT: dict[str, list[tuple[str, str]]] = {
    "afmoe": [("gate (3)", CHOOSE)],
    "bart": [("k_proj (2), out_proj (2), q_proj (2), v_proj (2)", NEVER)],
    "deepseek_v32": [("weights_proj (4), wk (4), wq_b (4)", NO_GRADIENT)],
    "deepseek_v4": [
        ("o_a_proj", "more than a matrix product"),
        ("gate_proj (2), kv_proj (2), q_b_proj (2)", NO_GRADIENT),
    ],
    "falcon_mamba": [("dt_proj (4)", NEVER), ("out_proj (4)", PEFT)],
    "gemma3n_text": [("correction_coefs (4)", NEVER)],
    "jamba": [("dt_proj (2)", NEVER)],
    "jetmoe": [("layer (8)", CHOOSE)],
    "llama": [],
    "longcat_flash": [("classifier (2)", NEVER)],
    "nemotron_h": [("out_proj (1)", PEFT)],
    "zaya": [("fc1 (4), fc2 (4), out_proj (4)", CHOOSE)],
}


def untrained_layers(model: Any, tokens: int) -> set[str]:
    """Return the adapted layers that get no gradient from a sequence of so many tokens."""
    adapted = apply_adapter(model, LoraSection(r=2), torch.float32).train()
    logits = adapted(input_ids=torch.arange(3, 3 + tokens)[None] % 300, use_cache=False).logits
    logits.float().square().mean().backward()
    idle = [name for name, each in adapted.named_parameters() if each.requires_grad and each.grad is None]
    return {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in idle}


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_what_cannot_learn_is_left_out_and_listed(kind: str) -> None:
    model = tiny_family(kind)
    check_targets(build_empty_model(tiny_config(kind), ModelSection()), LoraSection(r=2))
    assert untrained_layers(model, 200 if kind == "deepseek_v4" else 16) == set()
    adapted = apply_adapter(tiny_family(kind), LoraSection(r=2), torch.float32)
    lines = [line for line in describe_unadapted_layers(adapted, LoraSection(r=2)) if "the output head" not in line]
    assert len(lines) == len(LEFT_OUT[kind])
    for names, reason in LEFT_OUT[kind]:
        assert any(names in line and reason in line for line in lines), lines


@pytest.mark.parametrize(("stage", "quant_type"), [(0, "nf4"), (0, "int8"), (3, None), (3, "nf4")])
@pytest.mark.parametrize("kind", ["afmoe", "jetmoe"])
def test_routers_are_left_out_however_a_base_is_loaded(kind: str, stage: int, quant_type: Any, tmp_path: Path) -> None:
    expected = list(find_layers_to_adapt(build_empty_model(tiny_config(kind), ModelSection()), LoraSection(r=2)))
    settings = build_deepspeed_config(TrainingSection(batch_size=1), ZeroSection(stage=3), "fp32", on_gpu=False)
    with one_rank(tmp_path):
        model = load_base_model(
            str(save_family(tmp_path / "model", kind)), ModelSection(), dtype=torch.float32, device=torch.device("cpu"),
            attention=None, quantization=QuantizationSection(quant_type=quant_type) if quant_type else None,
            deepspeed_config=settings if stage else None,
        )  # fmt: skip
        assert list(find_layers_to_adapt(model, LoraSection(r=2))) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_adapted_layer_of_every_family_gets_a_gradient(kind: str) -> None:
    model = tiny_family(kind)
    late = probe_gradient_coverage(model).only_in_long_sequences
    assert untrained_layers(model, 16) <= late


def test_nothing_is_observed_of_a_model_whose_pass_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_family("opt", max_position_embeddings=251)
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: 1 / 0)
    assert probe_gradient_coverage(model).unreached == {}


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("deepseek_v32", "indexer.wk", "no gradient of the loss"),
        ("jamba", "dt_proj", "never called"),
        ("falcon_mamba", "out_proj", "PEFT does not adapt them in falcon_mamba models"),
        ("longcat_flash", "experts", "adapters do not support the experts of LongcatFlashExperts"),
    ],
)
def test_a_layer_that_cannot_learn_is_refused_by_name(kind: str, name: str, words: str) -> None:
    with pytest.raises(UserError, match=f"^lora.target_modules={name}: .*{words}"):
        check_targets(build_empty_model(tiny_config(kind), ModelSection()), LoraSection(r=2, target_modules=(name,)))


def test_a_name_of_more_layers_leaves_out_those_that_cannot_learn() -> None:
    lora = LoraSection(r=2, target_modules=("q_proj",))
    model = build_empty_model(tiny_config("bart"), ModelSection())
    check_targets(model, lora)
    assert list(find_layers_to_adapt(model, lora)) == [f"model.decoder.layers.{n}.self_attn.q_proj" for n in range(2)]
    [line] = describe_unadapted_layers(apply_adapter(tiny_family("bart"), lora, torch.float32), lora)
    assert line.startswith("without adapter: q_proj (2): never called")


def test_a_router_gets_an_adapter_by_its_name() -> None:
    lora = LoraSection(r=2, target_modules=("router.gate",))
    assert [
        layer.count for layer in summarize_adapted_layers(apply_adapter(tiny_family("afmoe"), lora, torch.float32))
    ] == [3]


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("kind", ["deepseek_v32", "deepseek_v4", "bart"])
def test_runs_of_such_models_train(kind: str, flat: bool, tmp_path: Path) -> None:
    """DeepSeek-V4 compresses 128 tokens into one: of shorter records its compressors get no gradient."""
    ground = make_ground(tmp_path)
    save_family(ground / "model", kind)
    console = train(ground, ops__flat=flat, ops__backend="reference", training__max_steps=2)
    assert "without adapter: " in console and "step 2/2" in console


def test_rwkv_is_not_rescaled_to_evaluate(tmp_path: Path) -> None:
    """Its weights would be divided in place, packed ones too, and what their adapters add would not."""
    save_family(tmp_path / "model", "rwkv", num_hidden_layers=8, rescale_every=2)
    for quantization in (None, QuantizationSection()):
        model = load_base_model(
            str(tmp_path / "model"), ModelSection(), dtype=torch.float32, device=torch.device("cpu"), attention=None,
            quantization=quantization,
        )  # fmt: skip
        adapted = apply_adapter(model, LoraSection(r=2, init="gaussian"), torch.float32)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        with torch.no_grad():
            evaluated, trained = (adapted.train(mode)(torch.arange(3, 15)[None]).logits for mode in (False, True))
        torch.testing.assert_close(evaluated, trained, rtol=1e-4, atol=1e-4)


def test_a_model_without_a_limit_has_no_longest_sequence() -> None:
    assert get_context_length(tiny_config("xlnet")) is None and get_context_length(tiny_config("llama")) == 256


def test_experts_that_text_never_reaches_get_no_adapter() -> None:
    """Ernie 4.5 VL has experts for images alone, which get no gradient in training on text."""
    targets = find_expert_targets(tiny_family("ernie4_5_vl_moe"), LoraSection(r=2))
    assert targets and not [path for path in targets if "vision_moe" in path]
