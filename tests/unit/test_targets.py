"""Names of targets and excludes: what they match, and what is said of those that match nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.distributed.test_architectures import MODELS, SMALL
from tests.distributed.test_families import EXPERTS, FAMILIES
from trainer.config import LoraSection, ModelSection, UserError
from trainer.model.adapter import apply_adapter, list_rank_warnings, summarize_adapted_layers
from trainer.model.base import build_empty_model
from trainer.model.targets import build_exclusion_pattern, check_targets, describe_unadapted_layers

LLAMA = {"num_hidden_layers": 2}
ALL = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def model_of(model_type: str, **settings: Any) -> Any:
    return build_empty_model(AutoConfig.for_model(model_type, **(SMALL | settings)), ModelSection())


def adapted(model: Any, **lora: Any) -> dict[str, int]:
    section = LoraSection(**lora)
    check_targets(model, section)
    return {layer.name: layer.count for layer in summarize_adapted_layers(apply_adapter(model, section, torch.float32))}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt": (
        {"target_modules": ("q_proj", "k_prj")},
        r"lora.target_modules=k_prj: matches no layer of this model; did you mean k_proj\? Available: .*q_proj \(2\)",
    ),
    "path": (
        {"target_modules": ("mlp.gate_prj",)},
        r"lora.target_modules=mlp.gate_prj: matches no layer.*did you mean gate_proj\?",
    ),
    "shortened": ({"target_modules": ("q", "v")}, r"lora.target_modules=q: .*did you mean q_proj\?"),
    "spaces": (
        {"target_modules": ("q_proj v_proj",)},
        r"target_modules=q_proj v_proj: .* did you mean q_proj, v_proj\?",
    ),
    "far off": ({"target_modules": ("xyz",)}, r"lora.target_modules=xyz: matches no layer of this model; available: "),
    "a module": (
        {"target_modules": ("mlp",)},
        r"=mlp: is not a layer, but contains layers; use down_proj \(2\), gate_proj \(2\), up_proj \(2\)",
    ),
    "exclude": (
        {"exclude_modules": ("k_prj",)},
        r"lora.exclude_modules=k_prj: matches no module.*did you mean k_proj\?",
    ),
    "tower": ({"exclude_modules": ("vision_tower",)}, r"lora.exclude_modules=vision_tower: matches no module"),
    "everything": ({"exclude_modules": ("model",)}, r"lora.exclude_modules=\[model\]: excludes all layers"),
    "saved": ({"modules_to_save": ("head",)}, r"lora.modules_to_save=head: matches no module.*lm_head"),
    "saved and adapted": (
        {"modules_to_save": ("lm_head",), "target_modules": ("lm_head", "q_proj")},
        r"^lora.target_modules=\[lm_head, q_proj\]: lm_head is trained in full, by lora.modules_to_save=\[lm_head\]",
    ),
    "adapted in a saved module": (
        {"modules_to_save": ("mlp",), "target_modules": (r".*\.(gate|q)_proj",)},
        r"^lora.target_modules=.*: model.layers.0.mlp.gate_proj is trained in full, by lora.modules_to_save=\[mlp\]",
    ),
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


def test_a_rank_beyond_the_layers_is_reported_and_beyond_all_of_them_refused(tmp_path: Path) -> None:
    model = model_of("llama", **LLAMA)
    with pytest.raises(UserError, match=r"lora.r=65: no adapted layer .* wider than 64, .* use 64 or less"):
        check_targets(model, LoraSection(r=65))
    check_targets(model, LoraSection(r=64))
    assert list_rank_warnings(LoraSection(r=8)) == []
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    said = f"lora.r=8: ignored, because the adapter at {tmp_path} has r=4"
    assert list_rank_warnings(LoraSection(r=8, adapter_path=str(tmp_path))) == [said]


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
        assert {layer.name: layer.count for layer in summarize_adapted_layers(each)} == dict.fromkeys(
            ALL - {"k_proj"}, 1
        )


def lines(model: Any, **lora: Any) -> list[str]:
    section = LoraSection(**lora)
    return describe_unadapted_layers(apply_adapter(model, section, torch.float32), section)


HEAD = "without adapter: lm_head (1): the output head"


def test_all_linear_reports_excluded_layers_and_why() -> None:
    assert lines(model_of("llama", **LLAMA)) == [HEAD]
    assert lines(model_of("llama", **LLAMA), exclude_modules=("mlp", "k_proj")) == [
        "without adapter: down_proj (2), gate_proj (2), k_proj (2), up_proj (2): lora.exclude_modules",
        HEAD,
    ]
    assert lines(model_of("llama", **LLAMA), target_modules=("q_proj",)) == [], "which were named"
    assert lines(model_of("llama", **LLAMA), modules_to_save=("lm_head",)) == [], "trained as a whole"
    assert lines(model_of("gpt2", **LLAMA)) == [HEAD]


def test_dense_layers_and_shared_experts_are_adapted_with_experts() -> None:
    """The first layer of DeepSeek-V3 is dense, the second has a shared expert: PEFT drops both (peft#3711)."""
    model = model_of("deepseek_v3", **LLAMA, **FAMILIES["deepseek_v3"])
    names = adapted(model)
    assert {"gate_proj", "up_proj", "down_proj", "experts.gate_up_proj", "experts.down_proj"} <= set(names)
    dense = model_of("qwen3_moe", **LLAMA, **EXPERTS, mlp_only_layers=[0, 1])
    assert adapted(dense) == dict.fromkeys(ALL, 2), "of a family that has experts, but none in this model"
    for model_type in ("deepseek_v3", "qwen3_moe"):
        assert lines(model_of(model_type, **LLAMA, **FAMILIES[model_type])) == [HEAD]


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
FUSED = {"experts.gate_up_proj", "experts.down_proj"}
NAMED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "parts": ({"target_modules": ("gate_proj", "up_proj", "down_proj")}, FUSED),
    "as Mixtral stores them": ({"target_modules": ("w1", "w2", "w3")}, FUSED),
    "one part": ({"target_modules": ("q_proj", "experts.*.up_proj")}, {"q_proj", "experts.gate_up_proj"}),
    "their module": ({"target_modules": ("mlp.experts",)}, FUSED),
    "by one word": ({"target_modules": ("experts",)}, FUSED),
    "parameters": ({"target_modules": ("q_proj",), "target_parameters": ("experts.down_proj",)},
                   {"q_proj", "experts.down_proj"}),
    "router": ({"target_modules": ("q_proj", "gate")}, {"q_proj", "gate"}),
    "router by its weight": ({"target_parameters": ("gate.weight",)}, ATTENTION | FUSED | {"gate"}),
    "none": ({"experts": False}, ATTENTION),
    "excluded": ({"exclude_modules": ("experts",)}, ATTENTION),
    "excluded in part": ({"exclude_modules": ("down_proj",)}, ATTENTION | {"experts.gate_up_proj"}),
    "router excluded": ({"exclude_modules": ("gate",)}, ATTENTION | FUSED),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_experts_go_by_the_usual_names(case: str) -> None:
    lora, expected = NAMED[case]
    assert adapted(model_of("qwen3_moe", **LLAMA, **EXPERTS), **lora) == dict.fromkeys(expected, 2)


def test_the_rank_of_experts_is_that_of_all_layers_a_number_or_divided_by_those_visited() -> None:
    for setting, rank in (("r", 8), ("r/top_k", 4), (2, 2)):
        section = LoraSection(r=8, expert_rank=setting)
        model = apply_adapter(model_of("qwen3_moe", **LLAMA, **EXPERTS), section, torch.float32)
        ranks = {name: weight.shape[-2] for name, weight in model.named_parameters() if "experts.lora_A" in name}
        assert set(ranks.values()) == {rank}


OF_EXPERTS: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"r": 16, "expert_rank": 48}, r"lora.expert_rank=48: exceeds the width 32 of an expert"),
    "rank of all": ({"r": 40}, r"lora.r=40: exceeds the width 32 of an expert.*r/top_k is 20 here"),
    "dora": ({"dora": True}, r"lora.dora=true: not supported for experts.*lora.experts: false"),
    "init": ({"init": "pissa"}, r"lora.init=pissa: not supported for experts.*lora.experts: false"),
    "parameter": ({"target_parameters": ("experts.dwn_proj",)}, r"dwn_proj: matches no parameter.*mean down_proj\?"),
    "named as modules and left out": (
        {"target_modules": ("experts",), "experts": False},
        r"lora.target_modules=experts: matches experts, but lora.experts is false; set lora.experts: true",
    ),
    "one of them": (
        {"target_modules": ("experts.1.w1",)},
        r"lora.target_modules=experts.1.w1: matches one expert, but all experts of a layer are adapted together; use "
        r"experts\.\*\.w1",
    ),
    "named and left out": (
        {"target_parameters": ("experts.down_proj",), "experts": False},
        r"lora.target_parameters=experts.down_proj: matches experts, but lora.experts is false; set lora.experts: true",
    ),
}


@pytest.mark.parametrize("case", OF_EXPERTS)
def test_unsupported_settings_of_experts_are_refused(case: str) -> None:
    lora, line = OF_EXPERTS[case]
    with pytest.raises(UserError, match=line):
        check_targets(model_of("qwen3_moe", **LLAMA, **EXPERTS), LoraSection(**lora))


@pytest.mark.parametrize(
    ("lora", "line"),
    [
        ({"target_modules": ("mlp.experts",)}, "lora.target_modules=mlp.experts: this model has no experts"),
        (
            {"target_parameters": ("experts.down_proj",)},
            "lora.target_parameters=experts.down_proj: this model has no exp",
        ),
        ({"expert_rank": 4}, "lora.expert_rank=4: this model has no experts; remove the setting"),
    ],
)
def test_experts_of_a_dense_model_are_refused(lora: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        check_targets(model_of("llama", **LLAMA), LoraSection(**lora))


def test_routers_that_are_linear_layers_by_class_alone_are_left_out() -> None:
    model_type, settings = MODELS["mixtral"]
    assert build_exclusion_pattern(model_of(model_type, **settings), LoraSection()) is None
    text = {
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "intermediate_size_mlp": 128,
        "interleave_moe_layer_step": 1,
    }
    model = model_of("llama4_text", **text)
    assert build_exclusion_pattern(model, LoraSection()) == r"(?:model\.layers\.\d+\.feed_forward\.router)(?:\..*)?"
    assert "without adapter: router (2): compute more than a matrix product, as routers do" in lines(model)
