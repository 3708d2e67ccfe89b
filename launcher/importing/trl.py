"""Command lines of TRL's and accelerate's scripts: `accelerate launch ... sft.py --model_name_or_path ...`."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.importing import common
from launcher.importing.translation import (
    EMPTY,
    Foreign,
    Key,
    Names,
    Text,
    Translation,
    Whole,
    make_table,
)
from trainer.config import UserError
from trainer.config.yaml_core import Yaml11Loader, parse, read_yaml

REFUSED_SCRIPTS = {
    common.PREFERENCES: r"online_dpo|grpo|gspo|ppo|mpo|orpo|cpo|bco|tpo|xpo|rloo|reward|nash|prm|sdpo",
    "distillation is not supported": r"gkd|gold|distillation|sdft|ssd",
    common.VISION: r"vlm",
    "diffusion language models are not supported": r"diffusion",
}
WHOLE_CONVERSATIONS = (
    "TRL trains on whole conversations, and on the completions of prompt and completion: for the latter write "
    "dataset.train_on: assistant"
)
UNPAIRED = "answers with a label are found by their fields; for pairs write dataset.format: unpaired"
ACCELERATE: dict[str, Any] = {
    "distributed_type": Text,
    "deepspeed_config": {
        "zero_stage": Whole,
        "offload_optimizer_device": Text,
        "offload_param_device": Text,
        "deepspeed_config_file": Text,
    },
    "fsdp_config": common.FSDP,
}
SOURCE = {"path": Text, "name": Text, "data_dir": Text, "data_files": Names, "split": Text, "columns": [Text]}
ANSWERS = Key(bool, "dataset.train_on", values={"true": ["assistant"]})
KEYS = common.TRANSFORMERS | make_table(
    """
    copy lora_r:16 lora_alpha:32 lora_dropout:0.05 lora_modules_to_save use_rslora use_dora dataset_name
    copy dataset_path=dataset.path train_file=dataset.path dataset_config=dataset.name dataset_config_name=dataset.name
    copy test_split_size=dataset.val_split dataset_streaming=dataset.streaming streaming max_length max_seq_length:1024
    copy packing pad_token=model.pad_token chat_template_path=dataset.chat_template learning_rate:2e-5
    copy beta=preference.beta label_smoothing=preference.label_smoothing discopop_tau=preference.discopop_tau
    copy desirable_weight=preference.desirable_weight undesirable_weight=preference.undesirable_weight
    copy ld_alpha=preference.length_weight router_aux_loss_coef torch_compile output_dir:trainer_output
    copy lora_target_modules bnb_4bit_quant_type:nf4 use_bnb_nested_quant=quantization.double_quant:false
    copy activation_offloading=training.offload_activations dataset_train_split=dataset.split!train
    flag use_peft load_in_4bit load_in_8bit use_deepspeed use_fsdp
    text attn_implementation dataset_test_split dataset_text_field config_file
    text offload_optimizer_device offload_param_device deepspeed_config_file
    names lora_target_parameters
    whole zero_stage
    steps logging_steps
    none do_train dataset_num_proc push_to_hub_token env logging_first_step logging_strategy remove_unused_columns
    none use_liger_kernel use_liger lora_task_type log_level report_to_all bf16_full_eval padding_free dataset_kwargs
    none dataset_batch_size model_type use_cpu group_by_length validation_split_percentage eos_token packing_strategy
    none shuffle_dataset disable_tqdm attn_implementation_kernel activation_offloading_kwargs pad_to_multiple_of
    none eval_packing num_processes num_machines machine_rank main_process_ip main_process_port mixed_precision
    none nproc_per_node nnodes node_rank master_addr master_port multi_gpu num_gpus include hostfile zero3_init_flag
    none dynamo_backend gpu_ids standalone num_cpu_threads_per_process
    """,
    {},
    {},
    {
        "gradient_checkpointing": Key(bool, "training.gradient_checkpointing", True),
        "assistant_only_loss": ANSWERS,
        "completion_only_loss": ANSWERS,
        "datasets": Key([SOURCE]),
        "loss_type": Key(
            Text,
            "training.loss",
            values={"nll": "nll", "chunked_nll": "nll", "dft": "dft"},
            otherwise="must be nll, chunked_nll or dft",
        ),
        "accelerate_config": Key((Text, ACCELERATE)),
    },
)
PAIR_KEYS = KEYS | {
    "loss_type": Key(Text, values=common.PREFERENCE_LOSSES, otherwise=common.PREFERENCES),
    "precompute_ref_log_probs": Key(bool, "preference.reference", values={"true": "cached"}),
}
KTO_KEYS = PAIR_KEYS | {
    "loss_type": Key(Text, values={"kto": "kto"}, otherwise="the only loss of labelled answers here is kto")
}


def read_command_line(arguments: Sequence[str], folder: Path) -> Foreign:
    """Read a command line with `--name value`, `--name=value` and `--flag`, of the script and its launcher."""
    at = next((at for at, word in enumerate(arguments) if word.endswith(".py")), None)
    script = "" if at is None else arguments[at]
    if arguments[0] == "trl":
        script = f"trl {arguments[1]}"
    stem = Path(script).stem.lower()
    for reason, names in REFUSED_SCRIPTS.items():
        if re.search(rf"(?<![a-z])({names})(?![a-z])", stem):
            raise UserError(f"{script}: {reason}")
    tree = read_options(arguments)
    if not tree:
        raise UserError(
            f"{' '.join(arguments)}: no options found; pass one configuration file, or the whole command line"
        )
    foreign = Foreign("TRL", script or "the command line", tree, folder, is_command_line=True)
    if config := tree.pop("config", None):
        foreign.path = Path(str(config))
        foreign.files.append(foreign.path)
        file = read_yaml(foreign.path, Yaml11Loader)
        foreign.tree = {**{str(name): value for name, value in file.tree.items()}, **tree}
        foreign.lines = {name: line for name, line in file.lines.items() if name.partition(".")[0] not in tree}
    return foreign


def read_options(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options of a command line by name; their values stay text until converted to their types."""
    found: dict[str, Any] = {}
    values: list[str] = []
    for word in reversed(arguments):
        if not word.startswith("--"):
            values.insert(0, word)
            continue
        name, equals, value = word[2:].partition("=")
        name, values = name.replace("-", "_"), [value] if equals else [one for one in values if not one.endswith(".py")]
        is_negated = name.startswith("no_") and not values
        read: Any = values if len(values) > 1 else values[0] if values else not is_negated
        if isinstance(read, str) and read.startswith("{"):
            with suppress(ValueError, UserError):
                read = parse(read)
        found.setdefault(name.removeprefix("no_") if is_negated else name, None if read == "None" else read)
        values = []
    return found


def translate(foreign: Foreign) -> Translation:
    """Return our settings for the arguments of TRL's sft.py, dpo.py and kto.py."""
    keys = KEYS if not trains_on_pairs(foreign) else KTO_KEYS if is_kto(foreign) else PAIR_KEYS
    t = Translation(foreign, keys)
    common.name_model(t, "model_name_or_path")
    common.set_attention(t, "attn_implementation")
    set_adapter(t)
    set_data(t)
    common.set_training(t, "bf16", ("steps", max(1, int(t.get("logging_steps", 10)))))
    common.set_distribution(t)
    set_accelerate(t)
    if trains_on_pairs(foreign):
        default = "kto" if is_kto(foreign) else "sigmoid"
        loss = {**common.PREFERENCE_LOSSES, "kto": "kto"}.get(str(t.get("loss_type", default)).lower(), "dpo")
        common.set_preference(t, loss, "max_length", "loss_type")
        if loss == "kto":
            t.note("loss_type" if t.get("loss_type") else "dataset_name", UNPAIRED)
    else:
        t.drop("preference.")
    return t


def trains_on_pairs(foreign: Foreign) -> bool:
    """Return whether the script is that of DPO or KTO."""
    return re.search(r"(?<![a-z])(dpo|kto)(?![a-z])", foreign.label.lower()) is not None


def is_kto(foreign: Foreign) -> bool:
    """Return whether the script is that of KTO."""
    return re.search(r"(?<![a-z])kto(?![a-z])", foreign.label.lower()) is not None


def set_adapter(t: Translation) -> None:
    """Set the kind of adapter, the bits of the base model, and the targets."""
    four, eight = t.get("load_in_4bit"), t.get("load_in_8bit")
    kind = "none" if not t.get("use_peft") and t.get("lora_r") is None else "qlora" if four or eight else "lora"
    t.put("adapter", kind, "use_peft", "load_in_4bit", "load_in_8bit")
    if kind == "qlora" and not four:
        t.put("quantization.quant_type", "int8", "load_in_8bit")
        t.note("load_in_8bit", common.INT8)
    common.set_default_targets(t, "use_peft")
    common.set_experts(t)


def set_data(t: Translation) -> None:
    """Set the sources and the evaluation data."""
    sources = [read_source(t, entry, f"datasets.{index}") for index, entry in enumerate(t.get("datasets", []))]
    if t.foreign.tree.get("datasets") in EMPTY and "dataset.path" not in t.settings:
        t.require("dataset_name", common.NO_DATA)
    t.put_sources(sources, "datasets")
    if field := t.get("dataset_text_field"):
        t.put("dataset.format", "completion", "dataset_text_field")
        t.put("dataset.fields", {"text": field}, "dataset_text_field")
    elif "dataset.train_on" not in t.settings and not trains_on_pairs(t.foreign):
        t.put("dataset.train_on", ["all"])
        t.note("datasets" if sources else "dataset_name", WHOLE_CONVERSATIONS)
    if t.first("eval_strategy", "evaluation_strategy") in (None, "no") or "dataset.val_split" in t.settings:
        return
    keys = ("path", "name", "format", "fields")
    source = {key: t.get_setting(f"dataset.{key}") for key in keys if f"dataset.{key}" in t.settings}
    if "path" in source:
        split = t.get("dataset_test_split", "test")
        t.put("dataset.evaluation", {**source, "split": split}, "eval_strategy", "dataset_test_split")


def read_source(t: Translation, entry: dict[str, Any], at: str) -> dict[str, Any]:
    """Return the settings of one source of a mixture."""
    if "path" not in entry:
        t.report(at, entry, "has no path")
    if "data_dir" in entry:
        t.report(f"{at}.data_dir", entry["data_dir"], "list its files in data_files")
    if "columns" in entry:
        t.leave_out(at, "columns: the fields of a record are found by their names")
    return {key: entry[key] for key in ("path", "name", "split", "data_files") if key in entry}


def set_accelerate(t: Translation) -> None:
    """Set the distribution from accelerate's file, the name of one of TRL's files, or options."""
    name = next((name for name in ("accelerate_config", "config_file") if t.get(name)), "")
    config = t.get(name)
    if isinstance(config, str):
        config = common.read_file(t, name, config, ACCELERATE)
        if config is None and t.foreign.find(t.get(name)) is None:
            set_by_name(t, name, t.get(name))
    elif not name and (t.get("use_deepspeed") or t.get("zero_stage") is not None):
        options = {option: t.get(option) for option in ACCELERATE["deepspeed_config"] if t.get(option) is not None}
        name, config = "zero_stage", {"distributed_type": "DEEPSPEED", "deepspeed_config": options}
    elif not name and t.get("use_fsdp"):
        name, config = "use_fsdp", {"distributed_type": "FSDP"}
    kind, zero = str((config or {}).get("distributed_type")).upper(), (config or {}).get("deepspeed_config", {})
    if kind == "FSDP":
        common.set_fsdp(t, name, config.get("fsdp_config", {}))
    elif kind == "DEEPSPEED" and "deepspeed_config_file" in zero:
        common.set_deepspeed(t, name, zero["deepspeed_config_file"])
    elif kind == "DEEPSPEED":
        offloads = [zero.get(f"offload_{part}_device") in ("cpu", "nvme") for part in ("optimizer", "param")]
        common.set_stage(t, name, zero.get("zero_stage", 2), optimizer=offloads[0], parameters=offloads[1])


def set_by_name(t: Translation, name: str, value: str) -> None:
    """Set the distribution from the name of a file that TRL or accelerate provides."""
    if re.search(r"fsdp", value):
        common.set_fsdp(t, name, {})
    elif not re.search(r"(single|multi)_gpu", value):
        common.set_stage_by_name(t, name, value)
