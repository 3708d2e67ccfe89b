"""Translate TRL and accelerate command lines, such as `accelerate launch ... sft.py --model_name_or_path ...`."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.importing import common
from launcher.importing.translation import EMPTY, ForeignConfig, Translation, load_table, read_tables, split_names
from trainer.config import UserError
from trainer.config.yaml_core import Yaml11Loader, parse_yaml_value, read_yaml

REFUSED_SCRIPTS: dict[str, str] = read_tables()["trl_scripts"]
WHOLE_CONVERSATIONS = (
    "TRL trains on whole conversations, but only on the completions of prompt-completion records; for those, set "
    "dataset.train_on: assistant"
)
UNPAIRED_NOTE = "labeled answers are recognized by their fields; for pairs, set dataset.format: unpaired"
KEYS = load_table("trl")
DEEPSPEED_OPTIONS = ("zero_stage", "offload_optimizer_device", "offload_param_device", "deepspeed_config_file")
"""DeepSpeed options in accelerate."""
SCRIPTS = {name: load_table(f"trl_{name}") for name in ("dpo", "kto", "reward")}
"""Tables for the scripts that train on pairs or labeled answers."""


def parse_command_line(arguments: Sequence[str], folder: Path) -> ForeignConfig:
    """Parse the command line of a script and its launcher: `--name value`, `--name=value` and `--flag`."""
    script = next((word for word in arguments if word.endswith(".py")), "")
    if arguments[0] == "trl":
        script = " ".join(arguments[:2])
        if not re.fullmatch(rf"trl (sft|{'|'.join([*SCRIPTS, *REFUSED_SCRIPTS])})", script):
            raise UserError(f"{script}: not a command of TRL; use trl sft, {', '.join(SCRIPTS)}")
    stem = Path(script).stem.lower()
    for names, reason in REFUSED_SCRIPTS.items():
        if re.search(rf"(?<![a-z])({names})(?![a-z])", stem):
            raise UserError(f"{script}: {reason}")
    tree = read_options(arguments)
    if not tree:
        raise UserError(f"{' '.join(arguments)}: no options; pass one configuration file, or the whole command line")
    foreign = ForeignConfig("TRL", script or "the command line", tree, folder, is_command_line=True)
    if config := tree.pop("config", None):
        if config is True:
            raise UserError("--config: missing value; pass a configuration file, such as --config sft.yaml")
        foreign.path = Path(str(config))
        file = read_yaml(foreign.path, Yaml11Loader)
        foreign.tree = {**{str(name): value for name, value in file.tree.items()}, **tree}
        foreign.lines = {name: line for name, line in file.lines.items() if name.partition(".")[0] not in tree}
    return foreign


def read_options(arguments: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    values: list[str] = []
    for word in reversed(arguments):
        if not word.startswith("--"):
            values.insert(0, word)
            continue
        name, equals, value = word[2:].partition("=")
        if equals and not value:
            raise UserError(f"--{name}: missing value after the =")
        if single := next((value for value in values if re.match("-[a-z]", value)), None):
            raise UserError(f"{single}: options begin with two dashes; write -{single}")
        name = name.replace("-", "_")
        values = [value] if equals else [item for item in values if not item.endswith(".py")]
        is_negated = name.startswith("no_") and not values
        read: Any = values if len(values) > 1 else values[0] if values else not is_negated
        if isinstance(read, str) and read.startswith("{"):
            with suppress(ValueError, UserError):
                read = parse_yaml_value(read)
        options.setdefault(name.removeprefix("no_") if is_negated else name, None if read == "None" else read)
        values = []
    return options


def translate(foreign: ForeignConfig) -> Translation:
    script = detect_script(foreign)
    t = Translation(foreign, SCRIPTS.get(script, KEYS))
    common.check_model(t, "model_name_or_path")
    common.set_attention(t, "attn_implementation")
    translate_adapter(t)
    translate_data(t)
    common.set_training(t, "bf16", ("steps", max(1, int(t.get("logging_steps", 10)))))
    common.set_distribution(t)
    translate_accelerate(t)
    if script == "dpo":
        common.set_preference(t, read_losses(t), "max_length", "loss_type", "loss_weights", "rpo_alpha")
    elif script == "kto":
        common.set_preference(t, {"kto": 1.0}, "max_length", "loss_type")
        t.note("loss_type" if t.get("loss_type") else "dataset_name", UNPAIRED_NOTE)
    elif script == "reward":
        common.set_preference(t, None, "max_length", "max_length")
    else:
        t.drop("preference.", "reward.")
    return t


def detect_script(foreign: ForeignConfig) -> str:
    """Return `dpo`, `kto` or `reward` if the script trains on pairs or labels, otherwise an empty string."""
    match = re.search(rf"(?<![a-z])({'|'.join(SCRIPTS)})(?![a-z])", foreign.label.lower())
    return match[1] if match else ""


def read_losses(t: Translation) -> dict[str, float]:
    names = [name.lower() for name in split_names(t.get("loss_type", "sigmoid"))]
    for name in names:
        if name not in common.PREFERENCE_LOSSES:
            t.reject("loss_type", f"{name}: {common.REASONS['preferences']}")
    weights = t.get("loss_weights", [1.0] * len(names))
    if len(weights) != len(names):
        t.reject("loss_weights", "must have one number for each loss in loss_type")
    losses = {common.PREFERENCE_LOSSES.get(name, "dpo"): weight for name, weight in zip(names, weights, strict=False)}
    return losses | ({"sft": t.get("rpo_alpha")} if t.get("rpo_alpha") else {})


def translate_adapter(t: Translation) -> None:
    common.check_bits(t)
    four, eight = t.get("load_in_4bit"), t.get("load_in_8bit")
    kind = "none" if not t.get("use_peft") and t.get("lora_r") is None else "qlora" if four or eight else "lora"
    cause = "use_peft" if t.get("use_peft") or kind == "none" else "lora_r"
    t.put("adapter", kind, cause, "load_in_4bit", "load_in_8bit")
    if cause == "lora_r":
        t.note(cause, "without use_peft, TRL trains all weights instead of an adapter; for that, set adapter: none")
    if kind == "none" and (four or eight):
        t.reject("load_in_4bit" if four else "load_in_8bit", "quantized weights cannot be trained; add --use_peft")
    if kind == "qlora" and not four:
        t.put("quantization.quant_type", "int8", "load_in_8bit")
        t.note("load_in_8bit", common.INT8_NOTE)
    common.set_default_targets(t, cause)
    common.set_experts(t)


def translate_data(t: Translation) -> None:
    sources = [read_source(t, entry, f"datasets.{index}") for index, entry in enumerate(t.get("datasets", []))]
    if t.foreign.tree.get("datasets") in EMPTY and "dataset.path" not in t.settings:
        t.require("dataset_name", common.NO_DATA)
    t.put_sources(sources, "datasets")
    if t.foreign.tree.get("max_length", "") is None:
        t.note("max_length", "TRL would not truncate; dataset.max_length does, so increase it for longer documents")
    if field := t.get("dataset_text_field"):
        t.put("dataset.format", "completion", "dataset_text_field")
        t.put("dataset.fields", {"text": field}, "dataset_text_field")
    elif "dataset.train_on" not in t.settings and not detect_script(t.foreign):
        t.put("dataset.train_on", ["all"])
        t.note("datasets" if sources else "dataset_name", WHOLE_CONVERSATIONS)
    if t.get_first("eval_strategy", "evaluation_strategy") in (None, "no") or "dataset.val_split" in t.settings:
        return
    keys = ("path", "name", "format", "fields")
    source = {key: t.get_setting(f"dataset.{key}") for key in keys if f"dataset.{key}" in t.settings}
    if "path" in source:
        split = t.get("dataset_test_split", "test")
        t.put("dataset.evaluation", {**source, "split": split}, "eval_strategy", "dataset_test_split")


def read_source(t: Translation, entry: dict[str, Any], location: str) -> dict[str, Any]:
    if "path" not in entry:
        t.report(location, entry, "has no path; add one")
    if "data_dir" in entry:
        t.report(f"{location}.data_dir", entry["data_dir"], "not supported; list its files in data_files")
    if "columns" in entry:
        t.note_unsupported(location, "columns: fields are recognized by their names")
    return {key: entry[key] for key in ("path", "name", "split", "data_files") if key in entry}


def translate_accelerate(t: Translation) -> None:
    launcher = {"use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "zero_stage": "DEEPSPEED"}
    names = ("accelerate_config", "config_file", "zero_stage", "use_deepspeed", "use_fsdp")
    name = next((name for name in names if t.get(name) is not None and t.get(name) is not False), None)
    if name in launcher:
        options = {option: value for option in DEEPSPEED_OPTIONS if (value := t.get(option)) is not None}
        common.set_sharding(t, name, {"distributed_type": launcher[name], "deepspeed_config": options})
    elif name is not None:
        common.set_sharding(t, name, t.get(name))
