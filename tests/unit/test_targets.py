"""Names of targets and excludes: what they match, and what is said of those that match nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.distributed.test_architectures import MODELS, SMALL
from tests.distributed.test_families import EXPERTS, FAMILIES
from trainer.config import LoraSection, ModelSection, UserError
from trainer.model.adapter import adapted_layers, apply_adapter, rank_lines
from trainer.model.base import empty_model
from trainer.model.targets import check_targets, excluded_modules, unadapted_layers

LLAMA = {"num_hidden_layers": 2}
ALL = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def model_of(model_type: str, **settings: Any) -> Any:
    return empty_model(AutoConfig.for_model(model_type, **(SMALL | settings)), ModelSection())


def adapted(model: Any, **lora: Any) -> dict[str, int]:
    section = LoraSection(**lora)
    check_targets(model, section)
    return {layer.name: layer.count for layer in adapted_layers(apply_adapter(model, section, torch.float32))}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt": (
        {"target_modules": ("q_proj", "k_prj")},
        r"lora.target_modules=k_prj: matches no layer of this model; did you mean k_proj\? There are: .*q_proj \(2\)",
    ),
    "path": (
        {"target_modules": ("mlp.gate_prj",)},
        r"lora.target_modules=mlp.gate_prj: matches no layer.*did you mean gate_proj\?",
    ),
    "far off": ({"target_modules": ("xyz",)}, r"lora.target_modules=xyz: matches no layer of this model; there are: "),
    "a module": (
        {"target_modules": ("mlp",)},
        r"=mlp: is no layer but holds some; name those: down_proj \(2\), gate_proj \(2\), up_proj \(2\)",
    ),
    "exclude": (
        {"exclude_modules": ("k_prj",)},
        r"lora.exclude_modules=k_prj: matches no module.*did you mean k_proj\?",
    ),
    "tower": ({"exclude_modules": ("vision_tower",)}, r"lora.exclude_modules=vision_tower: matches no module"),
    "everything": ({"exclude_modules": ("model",)}, r"lora.exclude_modules=\[model\]: leaves no layer to adapt"),
    "saved": ({"modules_to_save": ("head",)}, r"lora.modules_to_save=head: matches no module.*lm_head"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_name_that_matches_nothing_is_refused_with_the_nearest(case: str) -> None:
    lora, line = REFUSED[case]
    with pytest.raises(UserError, match=line):
        check_targets(model_of("llama", **LLAMA), LoraSection(**lora))


EXCLUDED: dict[tuple[str, ...], dict[str, int]] = {
    (): dict.fromkeys(ALL, 2),
    ("k_proj",): dict.fromkeys(ALL - {"k_proj"}, 2),
    ("mlp",): dict.fromkeys(ALL - {"gate_proj", "up_proj", "down_proj"}, 2),
    ("layers.0",): dict.fromkeys(ALL, 1),
    ("model.layers.1.self_attn", "gate_proj"): dict.fromkeys(ALL - {"gate_proj"}, 2)
    | dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), 1),
    ("lm_head",): dict.fromkeys(ALL, 2),
}


@pytest.mark.parametrize("names", EXCLUDED)
def test_an_excluded_name_stands_for_all_below_it(names: tuple[str, ...]) -> None:
    assert adapted(model_of("llama", **LLAMA), exclude_modules=names) == EXCLUDED[names]


def test_a_rank_beyond_the_layers_is_said_and_beyond_all_of_them_refused(tmp_path: Path) -> None:
    model = model_of("llama", **LLAMA)
    with pytest.raises(UserError, match=r"lora.r=65: no adapted layer .* wider than 64, .* use 64 or less"):
        check_targets(model, LoraSection(r=65))
    check_targets(model, LoraSection(r=64))
    wide = LoraSection(r=40)
    layers = adapted_layers(apply_adapter(model_of("llama", **LLAMA), wide, torch.float32))
    narrow = "k_proj (64 -> 32), v_proj (64 -> 32)"
    assert rank_lines(layers, wide) == [
        f"adapter: r=40 is more than the width of {narrow}, where a higher rank adds nothing"
    ]
    assert rank_lines(layers, LoraSection(r=8)) == []
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    said = f"adapter: r=4, as in {tmp_path}; lora.r=8 is for new adapters"
    assert rank_lines(layers, LoraSection(r=8, adapter_path=str(tmp_path))) == [said]


def test_an_excluded_name_is_not_a_part_of_one() -> None:
    """`layers.1` is not layers.10, nor `proj` a projection."""
    model = model_of("llama", num_hidden_layers=11)
    assert adapted(model, exclude_modules=("layers.1",)) == dict.fromkeys(ALL, 10)
    with pytest.raises(UserError, match="matches no module"):
        check_targets(model_of("llama", **LLAMA), LoraSection(exclude_modules=("proj",)))


def test_plain_peft_leaves_out_the_same_when_it_loads(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config = AutoConfig.for_model("llama", **(SMALL | LLAMA))
    lora = LoraSection(r=4, exclude_modules=("layers.0", "k_proj"))
    model = apply_adapter(AutoModelForCausalLM.from_config(config), lora, torch.float32)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_config(config), tmp_path)
    for each in (model, loaded):
        assert {layer.name: layer.count for layer in adapted_layers(each)} == dict.fromkeys(ALL - {"k_proj"}, 1)


def lines(model: Any, **lora: Any) -> list[str]:
    section = LoraSection(**lora)
    return unadapted_layers(apply_adapter(model, section, torch.float32), section)


HEAD = "without adapter: lm_head (1): the output head"


def test_all_linear_says_what_it_left_out_and_why() -> None:
    assert lines(model_of("llama", **LLAMA)) == [HEAD]
    assert lines(model_of("llama", **LLAMA), exclude_modules=("mlp", "k_proj")) == [
        "without adapter: down_proj (2), gate_proj (2), k_proj (2), up_proj (2): lora.exclude_modules",
        HEAD,
    ]
    assert lines(model_of("llama", **LLAMA), target_modules=("q_proj",)) == [], "which were named"
    assert lines(model_of("llama", **LLAMA), modules_to_save=("lm_head",)) == [], "trained as a whole"
    assert lines(model_of("gpt2", **LLAMA)) == [HEAD]


def test_dense_layers_that_peft_takes_for_experts_are_said() -> None:
    """The first layer of DeepSeek-V3 is dense, the second has a shared expert: peft#3711."""
    model = model_of("deepseek_v3", **LLAMA, **FAMILIES["deepseek_v3"])
    assert lines(model) == [
        "without adapter: down_proj (2), gate_proj (2), up_proj (2): PEFT keeps these names for this model's experts "
        "(peft#3711)",
        HEAD,
    ]
    assert lines(model_of("qwen3_moe", **LLAMA, **EXPERTS)) == [HEAD], "its experts are adapted, and nothing is left"


def test_routers_that_are_linear_layers_by_class_alone_are_left_out() -> None:
    model_type, settings = MODELS["mixtral"]
    assert excluded_modules(model_of(model_type, **settings), LoraSection()) is None
    text = {
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "intermediate_size_mlp": 128,
        "interleave_moe_layer_step": 1,
    }
    model = model_of("llama4_text", **text)
    assert excluded_modules(model, LoraSection()) == r"(?:model\.layers\.\d+\.feed_forward\.router)(?:\..*)?"
    assert "without adapter: router (2): give more than a product, such as a choice of experts" in lines(model)
