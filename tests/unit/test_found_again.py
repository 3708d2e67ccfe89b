"""Every tensor of a saved adapter is found again by PEFT alone, on an empty base, whatever the family of the model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.mixtures import EXPERTS, GROUPS, LATENT, MIXTURES, SMALL
from tests.multimodal import MULTIMODAL
from trainer.checkpoint.adapter_files import AdapterFormat
from trainer.config import LoraSection, ModelSection, UserError
from trainer.model.adapter import apply_adapter
from trainer.model.base import build_empty_model
from trainer.model.older_names import map_loaded_names
from trainer.model.targets import Targets
from trainer.parallel.engine.flat_adapter import list_trained_parameters

DENSE = ("llama", "qwen2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "falcon", "bloom", "opt", "granitemoehybrid")
NOT_BUILT = 40
"""Maximum number of transformers' families that these settings build no model of, or that are refused."""


def config_of(name: str) -> Any:
    if name in MULTIMODAL:
        return AutoConfig.for_model(name, **MULTIMODAL[name])
    if name in MIXTURES:
        return AutoConfig.for_model(name, **(SMALL | EXPERTS | MIXTURES[name]))
    for more in ({}, GROUPS, GROUPS | LATENT):
        try:
            config = AutoConfig.for_model(name, **(SMALL | EXPERTS | more))
            build_empty_model(config, ModelSection())
            return config
        except Exception as error:  # each family has settings that it cannot be built with
            reason = error
    raise reason


def lost(name: str, folder: Path, **lora: Any) -> tuple[list[str], list[str]]:
    """Tensors that PEFT misses in the model or in the file, where ours has written the file. No value is computed."""
    config = config_of(name)
    with torch.device("meta"):
        ours = apply_adapter(build_empty_model(config, ModelSection()), LoraSection(r=2, **lora), torch.float32)
    form = AdapterFormat.from_model(ours, [path for path, _ in list_trained_parameters(ours)])
    shapes = {stored: value.shape for stored, value in form.build_tensors(dict(ours.named_parameters())).items()}
    save_file({stored: torch.zeros(shape) for stored, shape in shapes.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(form.settings)
    base = build_empty_model(config, ModelSection())
    plain = get_peft_model(base, LoraConfig.from_pretrained(folder), low_cpu_mem_usage=True)
    result: Any = plain.load_adapter(str(folder), "default", low_cpu_mem_usage=True)
    return result.missing_keys, result.unexpected_keys


@pytest.mark.parametrize("name", [*DENSE, *MIXTURES, *MULTIMODAL, "laguna", "ernie4_5_moe", "afmoe", "longcat_flash"])
def test_peft_takes_every_tensor(name: str, tmp_path: Path) -> None:
    assert lost(name, tmp_path) == ([], [])


@pytest.mark.parametrize("name", ["laguna", "qwen2_moe", "deepseek_v3"])
def test_peft_takes_every_tensor_of_some_layers(name: str, tmp_path: Path) -> None:
    lora = {"target_modules": ("q_proj", "down_proj", "up_proj", "gate_proj"), "exclude_modules": ("layers.0",)}
    assert lost(name, tmp_path, **(lora if name != "deepseek_v3" else {"target_modules": ("down_proj",)})) == ([], [])


def test_transformers_still_renames_what_it_has_renamed() -> None:
    """`mlp.shared_expert.` is a pattern with a final `.` that matches all: remove names_in_file when this fails."""
    name = "base_model.model.model.layers.1.mlp.shared_experts.up_proj.lora_A.weight"
    model = build_empty_model(config_of("laguna"), ModelSection())
    assert map_loaded_names(model, [name])[name] == name.replace("shared_experts.", "shared_experts..")


@pytest.mark.slow
def test_peft_takes_every_tensor_of_every_family_of_transformers(tmp_path: Path) -> None:
    failed, skipped = {}, []
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config_of(name)
        except Exception:
            skipped.append(name)
            continue
        (tmp_path / name).mkdir()
        try:
            if any(found := lost(name, tmp_path / name)):
                failed[name] = found
        except UserError:
            skipped.append(name)
    assert not failed and len(skipped) <= NOT_BUILT, (failed, skipped)


@pytest.mark.parametrize("wrong", [["q_proj"], ["q_proj", "k_proj", "lm_head"]])
def test_settings_that_mean_other_layers_are_refused_before_training(
    wrong: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if what is written for PEFT had a mistake."""

    def write(adapted: Any, *_: Any) -> None:
        adapted.peft_config["default"].target_modules = set(wrong)

    model = build_empty_model(config_of("llama"), ModelSection())
    paths = [path for path, _ in model.named_modules() if path.endswith(("q_proj", "k_proj"))]
    monkeypatch.setattr("trainer.model.adapter.resolve_targets", lambda *_: Targets(tuple(paths), (), (), 2))
    monkeypatch.setattr("trainer.model.adapter.set_saved_targets", write)
    with pytest.raises(UserError, match="PEFT would match other layers"):
        apply_adapter(model, LoraSection(r=2), torch.float32)


def test_names_that_peft_would_not_find_are_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.model.older_names.map_loaded_names", lambda model, names: {})
    model = build_empty_model(config_of("laguna"), ModelSection())
    with pytest.raises(UserError, match="PEFT could not reload 36 of 36 tensors"):
        apply_adapter(model, LoraSection(r=2), torch.float32)
