"""What is replaced on a model and its engine: all of it installed from one list."""

import inspect
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from tests.engine import adapted_engine, one_rank
from tests.tiny import make_model
from trainer.config import LoraSection, ModelSection, RunConfig
from trainer.model.adapter import apply_adapter
from trainer.model.base import load_base_model
from trainer.parallel.engine.layer_gather.shards import LayerShards
from trainer.parallel.engine.protocol import Engine
from trainer.patches.installation import PatchPlan, install_on_adapted_model, install_on_base_model
from trainer.patches.replace import undo

CPU = torch.device("cpu")
IDS = torch.arange(8)[None]
OWN_ALREADY = {"_parameters", "_buffers", "_modules", "training", "_hf_hook"}


@pytest.fixture(scope="module", autouse=True)
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_rank(tmp_path_factory.mktemp("rank")):
        yield


def run_dummy_forward(model: Any) -> object:
    return model(input_ids=torch.ones(1, 8, dtype=torch.long), use_cache=False)


def wanted(folder: Path, **changes: Any) -> PatchPlan:
    """All of it, also what only a GPU would have."""
    settings = {
        "base_model": str(folder),
        "output_dir": str(folder / "out"),
        "dataset": {"path": "none.jsonl", "max_length": 32},
        "training": {"batch_size": 1, "gradient_checkpointing": "non_reentrant", "offload_activations": True},
        "ops": {"backend": "reference"},
    }
    config = RunConfig.model_validate(settings)
    nothing = PatchPlan(
        config.training, "reference", True, 32, False, CPU, torch.float32, True, True, 
        "", "norms", "reference", "", False, run_dummy_forward,
    )  # fmt: skip
    return replace(nothing, **changes)


def state_of(modules: list[Any]) -> dict[tuple[int, str], Any]:
    """Every attribute of the modules but weights and children, hooks as what they call; functions of their files."""
    found: dict[tuple[int, str], Any] = {}
    for index, module in enumerate(modules):
        for name, value in vars(module).items():
            if name.endswith("_hooks") and not name.endswith("_with_kwargs_hooks"):
                value = tuple(value.values()) if hasattr(value, "values") else tuple(value)
            if name not in OWN_ALREADY:
                found[index, name] = value
    for file in {sys.modules[type(module).__module__] for module in modules}:
        found |= {(id(file), name): value for name, value in vars(file).items() if callable(value)}
    found[0, "sdpa"] = AttentionInterface()["sdpa"]
    return found


def differences(before: dict[tuple[int, str], Any], now: dict[tuple[int, str], Any]) -> set[str]:
    names = before.keys() | now.keys()
    nothing: tuple[None, ...] = ()
    return {
        name
        for place, name in names
        if before.get((place, name), nothing) is not (after := now.get((place, name), nothing))
        and before.get((place, name), nothing) != after
    }


def test_all_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "model", vocab_size=4096)
    monkeypatch.setattr("trainer.patches.packed_attention.has_flash", lambda *_: True)
    shards = LayerShards(CPU)
    how: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "attention": "sdpa"}
    base = load_base_model(str(folder), ModelSection(), shards=shards, **how)
    undo(base)  # what an earlier test of this process has left in the modeling file
    of_base = [module for module in base.modules() if not isinstance(module, torch.nn.Linear)]
    attention, before = base.config._attn_implementation, state_of(of_base)
    asked = wanted(folder, shards=shards)

    assert any("element-wise operators: " in line for line in install_on_base_model(base, asked))
    assert base.config._attn_implementation != attention
    assert {"forward", "apply_rotary_pos_emb"} <= differences(before, state_of(of_base))

    model = apply_adapter(base, LoraSection(r=4), torch.float32)
    adapted = [module for module in model.modules() if module not in of_base]
    before_adapted = state_of(adapted)
    install_on_adapted_model(model, asked)
    assert differences(before_adapted, state_of(adapted)) >= {"forward", "_forward_pre_hooks", "layer_shards"}
    changed = differences(before, state_of(of_base))
    assert {"_gradient_checkpointing_func", "_forward_hooks", "gradient_checkpointing"} <= changed
    undo(model)  # in the modeling file, for later tests of this process


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_engine_has_what_is_used_of_it(stage: int) -> None:
    engine = adapted_engine("bf16", stage, CPU)
    fields = set(Engine.__annotations__)
    methods = {name for name, what in vars(Engine).items() if inspect.isfunction(what) and not name.startswith("_")}
    assert len(fields) == 9 and len(methods) == 8
    assert {name for name in fields | methods if not hasattr(engine, name)} == set()
    for name in methods:
        ours, theirs = (inspect.signature(getattr(owner, name)).parameters for owner in (Engine, type(engine)))
        assert set(ours) <= set(theirs) or "kwargs" in theirs, name
