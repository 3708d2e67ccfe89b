"""Regular expressions of layers, and ranks and scales of their own, are those of PEFT."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.families import tiny_family
from tests.runs_in_process import make_ground, train
from tests.tiny import make_model
from trainer.checkpoint.finished_run import find_run, load_saved_tokenizer, load_trained_model
from trainer.commands.merged_model import merge
from trainer.config import LoraSection, ModelSection, UserError, load_config
from trainer.memory.model_widths import read_shapes
from trainer.model.adapter import apply_adapter, summarize_adapted_layers
from trainer.model.base import load_model_config
from trainer.model.targets import check_targets

CPU = torch.device("cpu")
QV = r"model\.layers\.\d+\.self_attn\.(q|v)_proj"
RANKS, ALPHAS = {"v_proj": 8, r"layers\.0\.mlp\..*": 2}, {r".*\.1\..*(q|gate)_proj": 32.0}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("q_proj, v_proj", ("q_proj", "v_proj")),
        (QV, (QV,)),
        (r".*\.(q_proj,k_proj)?x{1,2}, v_proj", (r".*\.(q_proj,k_proj)?x{1,2}", "v_proj")),
        (["q_proj", r".*mlp.*"], ("q_proj", r".*mlp.*")),
        ("experts.*.up_proj", ("experts.*.up_proj",)),
    ],
)
def test_a_comma_within_brackets_belongs_to_an_expression(given: Any, expected: tuple[str, ...]) -> None:
    assert LoraSection(target_modules=given).target_modules == expected


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("lora.target_modules='q_(proj'", "lora.target_modules.*q_.proj is not a valid regular expression"),
        ("lora.rank_pattern={'*x': 4}", "lora.rank_pattern.*not a valid regular expression"),
        ("lora.exclude_modules='('", r"exclude_modules=\(: .*unterminated subpattern.*; fix it"),
        ("lora.rank_pattern={q_proj: 0}", "lora.rank_pattern"),
        ("lora.alpha_pattern={q_proj: many}", "lora.alpha_pattern"),
        ("lora.rank_pattern={q_proj: 4} lora.adapter_path=a", "lora.rank_pattern={q_proj: 4}: only applies to a new"),
    ],
)
def test_what_is_no_pattern_is_refused(setting: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        load_config(make_ground(tmp_path) / "base.yaml", setting.replace("} lora", "}\nlora").split("\n"))


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"target_modules": r".*\.self_atn\..*"}, "matches no layer"),
        ({"rank_pattern": {"q_prj": 4}}, "rank_pattern=q_prj: matches no adapted layer.* mean q_proj"),
        ({"target_modules": ["q_proj"], "alpha_pattern": {"v_proj": 4.0}}, "alpha_pattern=v_proj: matches no adapted"),
        ({"exclude_modules": r".*\.mpl\..*"}, "matches no module"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(lora: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_targets(tiny_family("llama"), LoraSection(r=4, **lora))


CASES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "attention": ("llama", {"target_modules": QV}, QV),
    "by all names": ("llama", {"target_modules": r".*_proj", "exclude_modules": r".*\.0\..*"}, r".*\.[1-3]\..*_proj"),
    "dense layers of a mixture": ("deepseek_v3", {"target_modules": r".*\.(o|q_a)_proj"}, r".*\.(o|q_a)_proj"),
}


@pytest.mark.parametrize("case", CASES)
def test_plain_peft_finds_the_same_layers_by_the_expression(case: str, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    kind, ours, theirs = CASES[case]
    lora = LoraSection(r=4, **ours)
    check_targets(tiny_family(kind), lora)
    adapted = apply_adapter(tiny_family(kind), lora, torch.float32)
    plain = get_peft_model(tiny_family(kind), LoraConfig(r=4, target_modules=theirs))
    adapted.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny_family(kind), tmp_path)
    names = [{name for name, _ in model.named_parameters() if "lora_" in name} for model in (adapted, plain, again)]
    assert names[0] == names[1] == names[2] and names[0]


def test_experts_go_by_expressions_of_their_usual_names() -> None:
    lora = LoraSection(r=4, target_modules=r".*\.experts\.\*\.(gate|up)_proj", rank_pattern={"experts.gate_up_proj": 2})
    check_targets(tiny_family("qwen3_moe"), lora)
    adapted = apply_adapter(tiny_family("qwen3_moe"), lora, torch.float32)
    assert [layer.name for layer in summarize_adapted_layers(adapted)] == ["experts.gate_up_proj"]
    assert {each.shape[1] for name, each in adapted.named_parameters() if "lora_A" in name} == {2}


@pytest.mark.parametrize(
    "settings", [{}, {"ops__backend": "reference"}, {"ops__backend": "reference", "adapter": "qlora"}]
)
def test_ranks_and_scales_of_their_own_train_as_in_peft(settings: dict[str, Any], tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    ground = make_ground(tmp_path)
    patterns = {"lora__rank_pattern": RANKS, "lora__alpha_pattern": ALPHAS}
    console = train(ground, training__max_steps=3, training__learning_rate=1e-2, **patterns, **settings)
    run = find_run(tmp_path / "run")
    saved = json.loads((run.folder / "adapter_config.json").read_text())
    assert saved["rank_pattern"] == RANKS and saved["alpha_pattern"] == ALPHAS
    if settings:
        assert "14 of 14 adapted layers" in console
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    theirs = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", rank_pattern=RANKS, alpha_pattern=ALPHAS)
    plain = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), theirs)
    again, tokens = PeftModel.from_pretrained(base, run.folder), torch.arange(5, 25)[None]
    shapes = {name: value.shape for name, value in load_file(run.folder / "adapter_model.safetensors").items()}
    assert shapes == {
        name.replace(".default", ""): each.shape for name, each in plain.named_parameters() if "lora_" in name
    }
    scales = [
        {path: each.scaling["default"] for path, each in model.named_modules() if hasattr(each, "lora_A")}
        for model in (plain, again)
    ]
    assert scales[0] == scales[1] and len(set(scales[0].values())) > 2
    lora = run.config.lora
    estimated = read_shapes(
        load_model_config(str(tmp_path / "model"), ModelSection()), ModelSection(), lora
    ).trained_numel
    assert estimated == sum(shape.numel() for shape in shapes.values())
    if run.config.adapter == "lora":
        merged = AutoModelForCausalLM.from_pretrained(merge(run, tmp_path / "merged"))
        with torch.no_grad():
            expected = again(tokens).logits
            for model in (load_trained_model(run, load_saved_tokenizer(run), CPU), merged):
                torch.testing.assert_close(model(tokens).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", ["peft", "reference"])
def test_losses_are_those_of_plain_peft(backend: str, tmp_path: Path) -> None:
    from tests.plain_peft import plain_losses

    ground = make_ground(tmp_path)
    patterns = {"lora.target_modules": r".*\.(q|k|v|gate|up)_proj", "lora.rank_pattern": RANKS,
                "lora.alpha_pattern": ALPHAS, "training.learning_rate": 1e-2}  # fmt: skip
    train(ground, **{name.replace(".", "__"): value for name, value in patterns.items()}, ops__backend=backend)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    settings = [f"{name}={json.dumps(value)}" for name, value in patterns.items()]
    config = load_config(ground / "base.yaml", [*settings, f"output_dir={tmp_path / 'plain'}"]).config
    found = [record["train/loss"] for record in records if "train/loss" in record]
    assert found == pytest.approx(plain_losses(config, ranks=1, device=CPU), rel=1e-5)


@pytest.mark.parametrize("biased", [True, False])
def test_biases_of_an_adapter_that_cannot_be_merged_are_told_at_the_start(biased: bool, tmp_path: Path) -> None:
    """PEFT merges lora_bias into the layer's own bias, and into nothing else."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    ground = make_ground(tmp_path)
    make_model(tmp_path / "model", attention_bias=biased)
    lora = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], lora_bias=True, task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    get_peft_model(base, lora).save_pretrained(tmp_path / "first")
    console = train(ground, lora__adapter_path=str(tmp_path / "first"), training__max_steps=2)
    shown = " ".join(console.split())
    assert ("has lora_bias on layers without a bias (o_proj, q_proj)" in shown) is not biased
    assert ("1 warning in this run: warning: lora.adapter_path=" in shown) is not biased
    if biased:
        run, tokens = find_run(tmp_path / "run"), torch.arange(5, 25)[None]
        merged = AutoModelForCausalLM.from_pretrained(merge(run, tmp_path / "merged"))
        with torch.no_grad():
            expected = load_trained_model(run, load_saved_tokenizer(run), CPU)(tokens).logits
            torch.testing.assert_close(merged(tokens).logits, expected, rtol=0, atol=1e-5)
