"""Reading a configuration: files, overrides, other trainers' names, and what comes back out."""

from pathlib import Path

import pytest
import yaml

from trainer.commands.validate import main as validate
from trainer.config import RunConfig, UserError, dump_yaml, load_config
from trainer.config.aliases import ALIASES, REPLACEMENT_ADVICE
from trainer.config.messages import list_setting_names

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    format: alpaca
val_set_size: 0.1
output_dir: ./outputs/lora-out
adapter: lora
sequence_len: 2048
sample_packing: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: [gate_proj, down_proj]
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
gradient_checkpointing: true
logging_steps: 1
warmup_ratio: 0.1
weight_decay: 0.0
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def load(folder: Path, text: str, *overrides: str) -> RunConfig:
    return load_config(write(folder, text), overrides).config


SMALL = "base_model: some/model\noutput_dir: runs/x\ndataset: {path: data.jsonl}\n"


def test_names_of_axolotl_are_understood_and_every_other_name_noted(tmp_path: Path) -> None:
    loaded = load_config(write(tmp_path, AXOLOTL))
    config = loaded.config
    assert config.training.batch_size == 2 and config.training.epochs == 1.0
    assert config.lora.r == 16 and config.lora.target_modules == ("gate_proj", "down_proj")
    assert config.dataset.max_length == 2048 and config.dataset.packing and config.dataset.val_split == 0.1
    assert config.dataset.mix[0].format == "alpaca"
    assert config.training.gradient_checkpointing == "non_reentrant"
    assert "micro_batch_size is read as training.batch_size" in loaded.notes
    assert len(loaded.notes) == 18


def test_overrides_come_last_and_are_read_as_yaml(tmp_path: Path) -> None:
    overrides = (
        "lora.r=64", "learning_rate=3e-5", "lora.target_modules=q_proj,v_proj", "dataset.packing=true", "seed=9",
        "seed=10", "dataset.fields={prompt: question}", "lora.adapter_path=null", "zero={stage: 3}",
    )  # fmt: skip
    config = load(tmp_path, SMALL + "lora: {r: 8}\nzero: {offload_optimizer: true}\n", *overrides)
    assert config.lora.r == 64 and config.training.learning_rate == 3e-5
    assert config.lora.target_modules == ("q_proj", "v_proj")
    assert config.dataset.packing is True and config.dataset.fields == {"prompt": "question"}
    assert config.seed == 10, "the last of two overrides counts"
    assert config.zero.stage == 3 and config.zero.offload_optimizer is False, "a whole section replaces the section"


@pytest.mark.parametrize(
    ("text", "words"),
    [("[a, b]", ("a", "b")), ("a", ("a",)), ("'a, b'", ("a", "b")), ("none", ()), ("", ()), ("null", ())],
)
def test_lists_of_words_may_be_written_in_several_ways(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    assert load(tmp_path, SMALL + f"lora: {{exclude_modules: {text}}}\n").lora.exclude_modules == words


def test_dotted_keys_empty_sections_and_merge_keys_are_yaml_too(tmp_path: Path) -> None:
    config = load(tmp_path, SMALL + "lora:\ntraining.max_steps: 10\ntraining:\n  <<: {epochs: 3}\n  batch_size: 2\n")
    assert (config.training.max_steps, config.training.epochs, config.training.batch_size) == (10, 3.0, 2)


def test_a_dumped_configuration_loads_equal(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        SMALL,
        "training.learning_rate=1e-5",
        "lora.target_modules=a,b",
        "zero.extra={wall_clock_breakdown: true}",
    )
    assert load(tmp_path, dump_yaml(config)) == config
    record = tmp_path / "training_config.json"
    record.write_text(config.model_dump_json())
    assert load_config(record).config == config, "the JSON in a run's folder is a configuration as well"


def test_a_configuration_cannot_be_changed(tmp_path: Path) -> None:
    config = load(tmp_path, SMALL)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 1  # type: ignore[misc]


def test_a_setting_instead_of_a_file_is_reported() -> None:
    with pytest.raises(UserError, match=r"^base_model=random:tiny: is a setting; pass the run's YAML file"):
        load_config(Path("base_model=random:tiny"))


def test_every_other_name_leads_to_a_setting() -> None:
    settings = set(list_setting_names())
    sections = {"dataset.evaluation"}
    assert {ours for ours in ALIASES.values() if ours not in settings | sections} == set()
    assert settings.isdisjoint(ALIASES) and set(REPLACEMENT_ADVICE).isdisjoint(settings | set(ALIASES))


def test_every_setting_is_documented() -> None:
    undocumented = [
        f"{name}.{field}"
        for name, section in RunConfig.model_fields.items()
        for field, info in getattr(section.annotation, "model_fields", {"": section}).items()
        if not (info.description or getattr(info.annotation, "__doc__", None))
    ]
    assert undocumented == []


def test_off_is_text_for_text_settings_and_false_elsewhere(tmp_path: Path) -> None:
    config = load(tmp_path, SMALL + "logging: {progress: off}\n", "dataset.packing=true", "dataset.shuffle=false")
    assert (config.logging.progress, config.dataset.packing, config.dataset.shuffle) == ("off", True, False)
    assert load(tmp_path, dump_yaml(config)) == config


def test_numbers_that_yaml_takes_for_text_are_numbers(tmp_path: Path) -> None:
    # YAML 1.1, which PyYAML reads, sees a number in 1.0e-4 but text in 1e-4.
    assert yaml.safe_load("1e-4") == "1e-4"
    assert load(tmp_path, SMALL + "training: {learning_rate: 1e-4}\n").training.learning_rate == 1e-4


def test_a_run_without_a_folder_is_named_after_its_file(tmp_path: Path) -> None:
    path = tmp_path / "my-first.yaml"
    path.write_text("base_model: some/model\n")
    loaded = load_config(path, ["dataset.path=data.jsonl"])
    assert loaded.config.output_dir == "runs/my-first" and "after the file" in loaded.notes[0]
    assert load_config(path, ["dataset.path=d", "output_dir=elsewhere"]).config.output_dir == "elsewhere"


def test_settings_are_checked_without_model_and_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("base_model: no/such-model\noutput_dir: x\ndataset: {path: nowhere.jsonl}\n")
    assert validate([str(file), "lora.r=4", "--settings-only"]) == 0
    assert capsys.readouterr().out.endswith(f"zerolora validate {file} lora.r=4\n"), "with the overrides"
    assert validate([str(file), "lora.r=0", "--settings-only"]) == 2
    assert capsys.readouterr().err == "error: lora.r=0: must be 1 or more (command line)\n"
