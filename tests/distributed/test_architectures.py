"""Hybrids, biases, fused projections, experts: what is adapted and what is not, and PEFT reads what was learned."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.conftest import Case, Matrix, environment, launch
from tests.distributed.plan import case
from tests.tiny import make_tokenizer
from trainer.config import RunConfig
from trainer.patches.mamba import LAYER_KERNEL, install_mamba_projections
from trainer.setup.preflight import prepare

SMALL = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 32}
# Granite 4.0 H 1B with fewer and smaller layers; the multipliers are its own.
GRANITE = {
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "shared_intermediate_size": 128,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "position_embedding_type": "nope",
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
    "tie_word_embeddings": True,
    **MAMBA,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("granitemoehybrid", GRANITE),
    "granite-moe": (
        "granitemoehybrid",
        GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    ),
    "qwen2": ("qwen2", {"num_hidden_layers": 2}),
    "phi3": ("phi3", {"num_hidden_layers": 2, "sliding_window": 64}),
    "mixtral": ("mixtral", {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
# What the table at start must list: (name, in -> out, layers).
ADAPTED = {
    "granite": [
        ("input_linear", "64 -> 256", 3),
        ("output_linear", "128 -> 64", 3),
        ("in_proj", "64 -> 296", 2),
        ("out_proj", "128 -> 64", 2),
        ("q_proj", "64 -> 64", 1),
        ("k_proj", "64 -> 32", 1),
        ("v_proj", "64 -> 32", 1),
        ("o_proj", "64 -> 64", 1),
    ],
    "granite-moe": [
        ("experts.gate_up_proj", "64 -> 64", 3),
        ("experts.down_proj", "32 -> 64", 3),
        ("input_linear", "64 -> 256", 3),
        ("in_proj", "64 -> 296", 2),
        ("q_proj", "64 -> 64", 1),
    ],
    "qwen2": [("q_proj", "64 -> 64", 2), ("k_proj", "64 -> 32", 2), ("gate_proj", "64 -> 128", 2)],
    "phi3": [("qkv_proj", "64 -> 128", 2), ("gate_up_proj", "64 -> 256", 2), ("down_proj", "128 -> 64", 2)],
    "mixtral": [
        ("experts.gate_up_proj", "64 -> 256", 2),
        ("experts.down_proj", "128 -> 64", 2),
        ("q_proj", "64 -> 64", 2),
    ],
}
# What the lines at start must say of groups, and of what has no adapter.
SAID = {
    "granite": [
        "fused 14 of 14 adapted layers",
        "3 of them grouped",
        "without adapter (not linear layers): conv1d (2 of 160 x 1 x 4)",
        "mamba: 2 layers run in plain torch",
    ],
    "granite-moe": [
        "experts: 3 layers with an adapter of r=4 for each expert (down_proj, gate_up_proj)",
        "router (3 of",
    ],
    "qwen2": ["fused 14 of 14 adapted layers", "10 of them grouped"],
    "phi3": ["fused 8 of 8 adapted layers", "0 of them grouped"],
    "mixtral": ["fused 8 of 8 adapted layers", "experts: 2 layers with an adapter of r=4", "gate (2 of 4 x 64)"],
}
FUSED = {"ops__backend": "reference", "logging__report_to": "none", "training__learning_rate": 1e-2}
PLAN = [
    *(case(name, base_model=f"{name}-model", **FUSED) for name in MODELS),
    case("granite-stage3", base_model="granite-model", zero__stage=3, **FUSED),
    case("granite-qlora", base_model="granite-model", adapter="qlora", **FUSED),
    case("granite-recompute", base_model="granite-model", training__gradient_checkpointing="non_reentrant", **FUSED),
]


def make_architecture(folder: Path, model_type: str, settings: dict[str, Any]) -> None:
    """A random model of that type with the tests' tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SMALL | settings)))
    model.save_pretrained(folder)
    make_tokenizer(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder = tmp_path_factory.mktemp("architectures")
    for name, (model_type, settings) in MODELS.items():
        make_architecture(folder / f"{name}-model", model_type, settings)
    launch(folder, 2, PLAN, environment())
    return Matrix(folder, PLAN)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_adapted_is_in_the_table(runs: Matrix, name: str) -> None:
    rows = {tuple(line.split()[:5]) for line in runs[name].console.splitlines()}
    for layer, shape, count in ADAPTED[name]:
        assert (layer, *shape.split(), str(count)) in rows, runs[name].console


@pytest.mark.parametrize("name", MODELS)
def test_what_is_not_is_said_at_the_start(runs: Matrix, name: str) -> None:
    console = " ".join(runs[name].console.split())
    for words in SAID[name]:
        assert words in console
    if name in ("qwen2", "phi3"):
        assert console.count("without adapter") == console.count("without adapter: lm_head (1): the output head") == 1


@pytest.mark.parametrize("name", [case["name"] for case in PLAN])
def test_it_trains(runs: Matrix, name: str) -> None:
    """Every factor moves, but for experts that no token was sent to."""
    run = runs[name]
    assert len(run.losses) == 4 and run.records("eval/loss")[-1] < run.records("eval/loss")[0]
    still = [key for key, value in run.adapter().items() if "lora_B" in key and not value.any()]
    assert still == []


@pytest.mark.parametrize("name", MODELS)
def test_peft_reads_the_adapter_and_gives_the_final_training_loss(runs: Matrix, name: str) -> None:
    run = runs[name]
    assert held_out_loss(run) == pytest.approx(run.records("eval/loss")[-1], rel=1e-5)


def held_out_loss(run: Case) -> float:
    """Mean loss over the held-out target tokens by transformers and PEFT alone."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config = RunConfig.model_validate_json((run.folder / "training_config.json").read_text())
    config = config.model_copy(update={"output_dir": str(run.folder / "unused")})
    base = AutoModelForCausalLM.from_pretrained(config.base_model, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, run.folder).eval()
    samples = prepare(config).data.evaluation
    assert samples is not None
    total = count = 0.0
    for sample in (samples[index] for index in range(len(samples))):
        ids, trained = torch.tensor([sample.input_ids]), torch.tensor(sample.loss_weights)[1:]
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        total += float(losses[trained].sum())
        count += int(trained.sum())
    return total / count


@pytest.mark.parametrize("other", ["granite-stage3", "granite-recompute"])
def test_a_hybrid_learns_the_same_at_every_stage_and_with_recomputation(runs: Matrix, other: str) -> None:
    assert runs[other].losses == pytest.approx(runs["granite"].losses, rel=1e-5)


def test_a_kernel_for_a_whole_mamba_layer_does_not_bypass_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mamba-ssm's kernel reads out_proj's weight and never calls the layer; the stand-in does the same."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid as modeling

    make_architecture(tmp_path, *MODELS["granite"])
    config = LoraConfig(r=4, target_modules=["out_proj"], init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path), config).train()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits

    def kernel(zxbcdt: torch.Tensor, *args: Any, outproj_weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return zxbcdt[..., : outproj_weight.shape[1]] @ outproj_weight.t()

    monkeypatch.setattr(modeling, LAYER_KERNEL, kernel)
    with torch.no_grad():
        assert not torch.allclose(model(input_ids=ids, use_cache=False).logits, expected), "the stand-in is asked"
        lines = install_mamba_projections(model)
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)
    assert len(lines) == 1 and lines[0].startswith("mamba: ")


def test_a_plain_mamba_layer_keeps_its_kernel(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid as modeling

    make_architecture(tmp_path, *MODELS["granite"])
    before = getattr(modeling, LAYER_KERNEL)
    install_mamba_projections(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert getattr(modeling, LAYER_KERNEL) is before


def test_the_adapters_files_hold_experts_under_names_that_peft_knows(runs: Matrix) -> None:
    names = load_file(runs["mixtral"].folder / "adapter_model.safetensors")
    assert {name.split("layers.0.mlp.")[1] for name in names if "layers.0.mlp.experts" in name} == {
        "experts.lora_A.weight", "experts.lora_B.weight",
        "experts.base_layer.lora_A.weight", "experts.base_layer.lora_B.weight",
    }  # fmt: skip
