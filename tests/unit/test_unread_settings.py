"""A setting that cannot have an effect is a mistake: which switch each setting needs, as declared and as observed."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from launcher.importing.command import format_yaml, translate_arguments
from tests import runs_in_process
from trainer.config import LoadedConfig, RunConfig, UserError, dump_yaml, load_config
from trainer.config.checks import RULES
from trainer.config.messages import find_section, list_setting_names
from trainer.config.needs import Needs, list_needs
from trainer.config.types import Section

BASE: dict[str, Any] = {"base_model": "model", "output_dir": "run", "dataset": {"path": "data.jsonl"}}
# One or more settings, and what the message must name.
WITHOUT_EFFECT = {
    "scu.target=0.01": ("scu.target=0.01", "scu.enabled"),
    "scu.reference=missing.txt": ("scu.reference=missing.txt", "scu.enabled"),
    "scu.enabled=true scu.reference=a.txt": ("scu.reference=a.txt", "scu.measure is delta", "kl"),
    "scu.enabled=true scu.controller=fixed scu.kp=0.5": ("scu.kp=0.5", "scu.controller is fixed", "pi"),
    "training.min_lr_ratio=0.1": ("training.min_lr_ratio=0.1", "lr_scheduler is cosine", "cosine_with_min_lr"),
    "training.lr_scheduler=cosine training.min_lr_ratio=0.1": ("min_lr_ratio=0.1", "cosine_with_min_lr"),
    "training.lr_scheduler=constant training.warmup_steps=5": ("training.warmup_steps=5", "constant"),
    "training.early_stopping_threshold=0.1": ("early_stopping_threshold=0.1", "training.early_stopping is not set"),
    "training.resume_changes=[seed]": ("training.resume_changes", "training.resume_from_checkpoint is not set"),
    "training.eval_batch_size=2": ("training.eval_batch_size=2", "dataset.val_split and dataset.evaluation"),
    "dataset.revision=main": ("dataset.revision=main", "dataset.path is data.jsonl", "a Hub ID"),
    "dataset.name=en": ("dataset.name=en", "dataset.path is data.jsonl"),
    "dataset.weight=2": ("dataset.weight=2", "dataset.mix"),
    "dataset.path=null dataset.mix=[{path: a}] dataset.format=alpaca": (
        "dataset.format=alpaca",
        "dataset.mix is given",
    ),
    "dataset.evaluation={path: model, revision: main}": ("dataset.evaluation.revision=main", "path is model"),
    "model.revision=main": ("model.revision=main", "base_model is model"),
    "quantization.block_size=128": ("quantization.block_size=128", "adapter is lora", "qlora"),
    "adapter=qlora quantization.quant_type=fp8 quantization.block_size=128": ("block_size=128", "quant_type is fp8"),
    "adapter=none lora.r=8": ("lora.r=8", "adapter is none"),
    "zero.prefetch_bucket_size=1000": ("zero.prefetch_bucket_size=1000", "zero.stage is 2"),
    "zero.stage=3 zero.prefetch_bucket_size=1000": ("prefetch_bucket_size=1000", "zero.gather is layer"),
    "training.elastic=true training.max_restarts=0": ("training.elastic=true", "max_restarts"),
    "logging.sample_tokens=9": ("logging.sample_tokens=9", "logging.sample_prompts is not set"),
    "logging.project=mine": ("logging.project=mine", "wandb"),
    "task=image image.sample_steps=5": ("image.sample_steps=5", "logging.sample_prompts is not set"),
    "task=language image.flip=true": ("image.flip=true", "task is language"),
    "task=image dataset.packing=true": ("dataset.packing=true", "task is image"),
}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "data.jsonl").write_text("")
    return write(tmp_path / "c.yaml")


def write(path: Path, **sections: Any) -> Path:
    path.write_text(yaml.safe_dump(BASE | sections, sort_keys=False))
    return path


@pytest.mark.parametrize("overrides", WITHOUT_EFFECT)
def test_a_setting_without_effect_names_its_switch(overrides: str, file: Path) -> None:
    words = overrides.replace(": ", ":\0").replace(", ", ",\0").split()
    with pytest.raises(UserError) as refused:
        load_config(file, [word.replace("\0", " ") for word in words])
    line = str(refused.value)
    assert [part for part in WITHOUT_EFFECT[overrides] if part not in line] == [], line
    assert "\n" not in line and "remove" in line


@pytest.mark.parametrize("controller", ["linear", "cosine", "none"])
def test_a_target_next_to_a_schedule_is_a_warning_since_compare_runs_all_of_them(controller: str, file: Path) -> None:
    write(file, scu={"enabled": True, "target": 0.03})
    assert load_config(file).notes == () == load_config(file, ["scu.controller=fixed"]).notes
    (note,) = load_config(file, [f"scu.controller={controller}"]).notes
    assert note.startswith("scu.target=0.03: has no effect") and f"scu.controller: {controller}; " in note
    assert load_config(file, [f"scu.controller={controller}", "scu.target=auto"]).notes == ()


def test_one_switch_is_one_mistake_and_names_the_line_of_the_file(file: Path) -> None:
    write(file, scu={"target": 0.01, "kp": 0.4})
    with pytest.raises(UserError) as refused:
        load_config(file)
    assert str(refused.value).count("\n") == 0
    assert "kp" in str(refused.value) and "c.yaml:6" in str(refused.value)


def test_what_is_switched_off_on_purpose_is_left_out_with_a_note(file: Path) -> None:
    write(file, scu={"enabled": False, "target": 0.01})
    parked = load_config(file)
    assert parked.config.scu.target == "auto" and "scu.target" in parked.notes[0]
    write(file, scu={"enabled": True, "target": 0.01}, training={"lr_scheduler": "constant_with_warmup"})
    switched = load_config(file, ["scu.enabled=false"])
    assert switched.config.scu.target == "auto" and "scu.enabled is false" in switched.notes[0]
    assert "lora.experts is false" in load_config(file, ["lora.experts=false", "lora.expert_rank=4"]).notes[0]
    write(file, training={"warmup_ratio": 0.1, "warmup_steps": 5})
    assert "training.warmup_steps is given" in load_config(file).notes[0], "documented to take precedence"


def test_values_that_ask_for_nothing_are_no_mistake(file: Path) -> None:
    overrides = ["training.lr_scheduler=constant", "training.warmup_ratio=0", "training.early_stopping_threshold=0"]
    assert load_config(file, overrides).notes == ()


@pytest.mark.parametrize("override", ["adapter=none", "scu.enabled=true", "zero.stage=3"])
def test_a_record_of_all_settings_is_read_back(override: str, file: Path) -> None:
    config = load_config(file, [override]).config
    Path("again.yaml").write_text(dump_yaml(config))
    assert load_config("again.yaml") == LoadedConfig(config, ())


def test_import_turns_settings_without_effect_into_remarks(tmp_path: Path) -> None:
    theirs = tmp_path / "sft.yaml"
    theirs.write_text(
        "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\ndataset: data\nlr_scheduler_type: constant\n"
        "per_device_eval_batch_size: 4\nwarmup_ratio: 0.1\ntemplate: llama3\noutput_dir: out\n"
    )
    (tmp_path / "dataset_info.json").write_text('{"data": {"file_name": "data.json"}}')
    translation = translate_arguments([str(theirs)], tmp_path)
    assert {name for name, reason in translation.left_out if "no effect" in reason} == {
        "per_device_eval_batch_size", "warmup_ratio",
    }  # fmt: skip
    (tmp_path / "mine.yaml").write_text(format_yaml(translation, "mine.yaml"))
    load_config(tmp_path / "mine.yaml")


# Read by other commands, on a GPU, or when something goes wrong.
READ_ELSEWHERE = {
    "training.cudnn_benchmark", "training.memory_fraction", "training.on_nonfinite",  # on a GPU
    "training.ignore_memory_check", "training.on_oom",  # where there is too little memory
    "training.epochs",  # max_steps is given
    "training.elastic", "training.launcher_timeout", "training.max_restarts",  # by the launcher
}  # fmt: skip
# Handed on or checked without being used.
CHECKED = set(re.findall(r"[a-z_]+\.[a-z_0-9.]+(?=:)", str(RULES["combinations"]).replace("'", "")))
READ_WITHOUT_EFFECT = {"model.revision", "zero.pin_memory"} | CHECKED


@contextmanager
def recorded_reads() -> Iterator[set[tuple[str, str]]]:
    """Record (class, name) of every attribute of a section that is read after a configuration was loaded."""
    seen: set[tuple[str, str]] = set()

    def read(section: Any, name: str) -> Any:
        seen.add((type(section).__name__, name))
        return object.__getattribute__(section, name)

    def load(*arguments: Any) -> LoadedConfig:
        loaded = load_config(*arguments)
        seen.clear()
        return loaded

    with patch.object(Section, "__getattribute__", read), patch.object(runs_in_process, "load_config", load):
        yield seen


def needs_of(name: str) -> tuple[Needs, ...]:
    """Return the declared needs of a setting and of its section."""
    *above, last = name.split(".")
    section = find_section(above)
    assert section is not None
    own = list_needs(section, last, ".".join([*above, ""]))
    return (list_needs(RunConfig, above[0]) if above else ()) + own


def test_settings_are_read_exactly_while_their_declared_needs_are_met(tmp_path: Path) -> None:
    ground = runs_in_process.make_ground(tmp_path)
    with recorded_reads() as seen:
        runs_in_process.train(ground, task="language")
    config = load_config(ground / "base.yaml", ["task=language"]).config
    classes = {type(getattr(config, name)).__name__: f"{name}." for name in RunConfig.model_fields}
    read = {classes.get(section, "") + name for section, name in seen}
    assert read >= READ_WITHOUT_EFFECT - CHECKED
    for name in list_setting_names():
        is_met = all(need.is_met(config, name) for need in needs_of(name))
        if is_met and not name.startswith("tier."):  # those are limits of `zerolora tier`
            assert name in read | READ_ELSEWHERE, f"{name}: nothing reads it; declare what it needs"
        elif not is_met:
            assert name not in read - READ_WITHOUT_EFFECT, f"{name}: is read although its needs are not met"


def test_every_declared_switch_exists_and_takes_the_values() -> None:
    for name in list_setting_names():
        for need in needs_of(name):
            assert [switch for switch in need.switch.split() if not is_setting(switch)] == [], name


def is_setting(name: str) -> bool:
    *above, last = name.split(".")
    section = find_section(above)
    return (section is not None and last in section.model_fields) or last == "mix"
