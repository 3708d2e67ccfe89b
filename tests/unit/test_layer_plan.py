"""What is gathered together is found from the module tree, whatever the architecture calls its modules."""

from typing import Any

import pytest
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.parallel.engine.layer_gather.shards import UnitPlan, plan_units

WIDE = {"vocab_size": 4096, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
LLAMA = {**WIDE, "intermediate_size": 128, "num_key_value_heads": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2": LLAMA,
    "gpt_neox": {**WIDE, "intermediate_size": 128},
    "gpt2": {"vocab_size": 4096, "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 64},
    "gemma3_text": {**LLAMA, "head_dim": 16},
    "mixtral": {**LLAMA, "num_local_experts": 4},
    "granitemoehybrid": {
        **LLAMA,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "shared_intermediate_size": 128,
        "num_local_experts": 0,
    },
}


def empty(model_type: str, **changes: Any) -> Any:
    config = AutoConfig.for_model(model_type, **(ARCHITECTURES[model_type] | {"tie_word_embeddings": False} | changes))
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model


def shapes(model: Any, units: list[UnitPlan]) -> list[int]:
    """Elements of each unit."""
    return [sum(model.get_parameter(name).numel() for name in unit.parameters) for unit in units]


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_block_is_a_unit_and_so_are_embedding_and_head(model_type: str) -> None:
    model = empty(model_type)
    units = plan_units(model)
    named = [name for unit in units for name in unit.parameters]
    assert len(named) == len(set(named))
    vocabulary = [
        unit for unit in units if unit.path == unit.last_module and model.get_submodule(unit.path)._parameters
    ]
    assert {model.get_submodule(unit.path) for unit in vocabulary} == {
        model.get_input_embeddings(),
        model.get_output_embeddings(),
    }
    assert len(units) == 5  # and three blocks
    left = sum(p.numel() for p in model.parameters()) - sum(shapes(model, units))
    assert left < 5_000  # the last norm, and GPT-2's 64 positions of 64


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_unit_is_whole_after_its_last_module(model_type: str) -> None:
    """Modules are filled in the order of named_modules: the first after which all of the unit's have been seen."""
    model = empty(model_type)
    filled = [path for path, _ in model.named_modules()]
    for unit in plan_units(model):
        owners = {name.rpartition(".")[0] for name in unit.parameters}
        assert max(filled.index(owner) for owner in owners) <= filled.index(unit.last_module)
        assert f"{unit.last_module}.".startswith(f"{unit.path}.")


def test_a_tied_head_belongs_to_the_embedding() -> None:
    units = plan_units(empty("llama", tie_word_embeddings=True))
    assert sorted(unit.path for unit in units) == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.layers.2",
    ]


def test_what_is_trained_in_full_stays_whole() -> None:
    names = [name for unit in plan_units(empty("llama"), ["lm_head", "mlp.up_proj"]) for name in unit.parameters]
    assert "model.embed_tokens.weight" in names and "model.layers.0.mlp.down_proj.weight" in names
    assert not [name for name in names if "lm_head" in name or "up_proj" in name]


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_that_will_grow_stay_whole(tied: bool) -> None:
    units = plan_units(empty("llama", tie_word_embeddings=tied), keep_embeddings=True)
    assert [unit.path for unit in units] == ["model.layers.0", "model.layers.1", "model.layers.2"]


def test_a_weight_that_blocks_share_stays_whole() -> None:
    model = empty("llama")
    model.model.layers[2].mlp = model.model.layers[0].mlp
    units = {unit.path: unit for unit in plan_units(model)}
    assert len(units) == 5
    assert not [name for unit in units.values() for name in unit.parameters if "layers.0.mlp" in name]
    assert "model.layers.1.mlp.up_proj.weight" in units["model.layers.1"].parameters
