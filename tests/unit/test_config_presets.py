"""The files in configs/ load, say how they are run, and are what their readers expect."""

from pathlib import Path

import pytest

from trainer.config import load_config

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = {
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "llama2-7b": "meta-llama/Llama-2-7b-chat-hf",
    "llama3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "phi3-mini": "microsoft/Phi-3-mini-4k-instruct",
    "granite-4.0-h-1b": "ibm-granite/granite-4.0-h-1b",
}
TIERS = ("quick", "convergence", "convergence_qlora", "memory", "extended", "full")
FILES = sorted(CONFIGS.glob("*.yaml"))


def test_no_preset_is_missing() -> None:
    assert set(PRESETS) <= {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_preset_loads_without_a_note_and_starts_with_its_command(path: Path) -> None:
    loaded = load_config(path)
    assert loaded.notes == (), "presets use our own names"
    command = path.read_text().splitlines()[0]
    own = {"demo", "demo-images", "compare-smollm2"} | {f"tier_{name}" for name in TIERS}
    assert command.startswith(f"# zerolora train configs/{path.name}") or path.stem in own
    overrides = [word for word in command.split() if "=" in word]
    assert load_config(path, overrides).config.output_dir == loaded.config.output_dir


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_names_its_model_and_a_folder_of_its_own(name: str) -> None:
    path = CONFIGS / f"{name}.yaml"
    config = load_config(path).config
    assert config.base_model == PRESETS[name]
    assert config.output_dir == f"runs/{name}"
    assert config.dataset.path == "data/train.jsonl"
    assert config.lora.target_modules == ("all-linear",)
    assert config.dataset.packing is (name != "granite-4.0-h-1b"), "a hybrid model cannot be packed"
    assert ("Gated" in path.read_text()) is config.base_model.startswith("meta-llama/")


@pytest.mark.parametrize("name", TIERS)
def test_a_tier_names_its_command_and_needs_no_partitioning(name: str) -> None:
    path = CONFIGS / f"tier_{name}.yaml"
    config = load_config(path).config
    assert path.read_text().startswith(f"# zerolora tier {name}\n")
    assert (config.output_dir, config.zero.stage, config.output.overwrite) == (f"runs/tiers/{name}", 0, "delete")
    assert config.adapter == ("lora" if name == "convergence" else "qlora")
