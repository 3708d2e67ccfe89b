"""Command lines of TRL's and accelerate's scripts: `accelerate launch ... sft.py --model_name_or_path ...`."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from launcher.importing import common_words as words
from launcher.importing.translation import Setting, Theirs, Translation
from trainer.config import UserError
from trainer.config.yaml_core import plain, read_yaml

PREFERENCES = "preference and reward training are not offered"
REFUSED_SCRIPTS = re.compile(r"\b(dpo|grpo|ppo|kto|orpo|reward|rloo|cpo|gkd|online_dpo|nash_md|xpo|prm)\b")
REFUSED = {
    "load_in_8bit": "",
    "use_liger_loss": "",
    "loss_type_dft": "",
}
WITHOUT_EFFECT = (
    "logging_steps do_train do_eval dataset_num_proc dataloader_num_workers ddp_timeout ddp_find_unused_parameters "
    "push_to_hub_token logging_first_step logging_strategy remove_unused_columns use_liger_kernel use_liger "
    "lora_task_type log_level report_to_all save_strategy save_only_model bf16_full_eval tf32 padding_free "
    "dataset_kwargs dataset_batch_size model_type use_cpu group_by_length gradient_checkpointing_kwargs "
    "overwrite_cache preprocessing_num_workers validation_split_percentage torch_dtype dtype use_peft eos_token "
    "disable_tqdm attn_implementation_kernel activation_offloading_kwargs pad_to_multiple_of eval_packing"
).split()
OF_LAUNCHERS = {
    "config_file": 1, "num_processes": 1, "num_machines": 1, "machine_rank": 1, "main_process_ip": 1,
    "main_process_port": 1, "mixed_precision": 1, "nproc_per_node": 1, "nnodes": 1, "node_rank": 1, "master_addr": 1,
    "master_port": 1, "multi_gpu": 0, "use_deepspeed": 0, "use_fsdp": 0, "zero_stage": 1, "deepspeed_config_file": 1,
    "num_gpus": 1, "include": 1, "hostfile": 1, "zero3_init_flag": 1, "gradient_accumulation_steps": 1,
    "offload_optimizer_device": 1, "offload_param_device": 1, "dynamo_backend": 1, "gpu_ids": 1, "standalone": 0,
    "num_cpu_threads_per_process": 1,
}  # fmt: skip


def from_words(typed: Sequence[str], folder: Path) -> Theirs:
    """What a command line says: `--name value`, `--name=value` and `--flag`, behind the script's name."""
    split = next((at for at, word in enumerate(typed) if word.endswith(".py")), None)
    launcher, script = [], ""
    rest = list(typed)
    if split is not None:
        launcher, script, rest = list(typed[:split]), typed[split], list(typed[split + 1 :])
    elif rest[:2] in (["trl", "sft"], ["trl", "dpo"], ["trl", "grpo"], ["trl", "kto"]):
        script, rest = rest[1], rest[2:]
    if REFUSED_SCRIPTS.search(Path(script).stem.replace("_", " ")):
        raise UserError(f"{script}: {PREFERENCES}")
    tree: dict[str, Any] = {}
    for name, value in _options(rest):
        tree[name] = value
    if config := tree.pop("config", None):
        tree = {**read_yaml(Path(str(config))).tree, **tree}
    started = dict(_options([word for word in launcher if word.startswith("-") or "=" not in word]))
    if file := started.get("config_file"):
        tree["accelerate_config"] = _accelerate(folder / str(file), str(file))
    elif "zero_stage" in started or "use_deepspeed" in started:
        tree["accelerate_config"] = {"distributed_type": "DEEPSPEED", "deepspeed_config": started}
    elif "use_fsdp" in started:
        tree["accelerate_config"] = {"distributed_type": "FSDP", "fsdp_config": started}
    return Theirs(Path(script or "the command line"), "TRL", tree, {}, folder)


def _options(typed: Sequence[str]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    at = 0
    while at < len(typed):
        word = typed[at]
        at += 1
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        while not equals and at < len(typed) and not typed[at].startswith("--") and not typed[at].endswith(".py"):
            values.append(typed[at])
            at += 1
        name = name.replace("-", "_")
        read: Any = True if not values else [_value(v) for v in values] if len(values) > 1 else _value(values[0])
        if name.startswith("no_") and not values:
            name, read = name[3:], False
        found.append((name, read))
    return found


def _value(text: str) -> Any:
    return {"True": True, "False": False, "None": None}.get(text, plain(text))


def _accelerate(path: Path, typed: str) -> dict[str, Any]:
    if not path.is_file():
        # The names that accelerate's and TRL's own files have say which they are.
        if stage := re.search(r"zero([0-3])", typed):
            return {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": int(stage.group(1))}}
        return {"distributed_type": "FSDP", "fsdp_config": {}} if "fsdp" in typed else {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        raise UserError(f"--config_file {typed}: not valid YAML") from None
    return content if isinstance(content, dict) else {}


def translate(theirs: Theirs) -> Translation:
    """Ours from the arguments of TRL's sft.py. Raises Refused for what is not offered here."""
    translation = Translation(theirs)
    if not translation.copy("base_model", "model_name_or_path"):
        raise theirs.refused("model_name_or_path", "missing; a model must be named")
    if found := words.QUANTIZED_NAMES.search(str(theirs.tree["model_name_or_path"])):
        raise theirs.refused("model_name_or_path", f"its weights are in {found.group(1)}; name the 16-bit model")
    revision = theirs.take("model_revision")
    if revision not in (None, "main"):
        translation.set("model.revision", revision, "model_revision")
    translation.copy("model.trust_remote_code", "trust_remote_code")
    words.attention(translation, "attn_implementation")
    _adapter(translation)
    _data(translation)
    _training(translation)
    _launch(translation)
    words.reporters(translation, "report_to")
    translation.copy("logging.run_name", "run_name")
    for name in ("push_to_hub", "hub_model_id"):
        if theirs.has(name):
            translation.leave_out(name, "upload with `zerolora push RUN REPO` after training")
    translation.finish(WITHOUT_EFFECT, ("wandb_", "hub_"))
    return translation


def _adapter(translation: Translation) -> None:
    theirs = translation.theirs
    four, eight = theirs.take("load_in_4bit", "use_bnb_nested_quant_4bit") is True, theirs.take("load_in_8bit") is True
    if theirs.take("use_peft") is not True and not theirs.has("lora_r"):
        translation.settings["adapter"] = Setting("none", "no --use_peft")
        return
    name = "load_in_4bit" if four else "use_peft"
    translation.set("adapter", "qlora" if four or eight else "lora", name)
    if eight and not four:
        translation.set("quantization.quant_type", "int8", "load_in_8bit")
        translation.differs("load_in_8bit", words.INT8)
    for ours, their, default in (("r", "lora_r", 16), ("alpha", "lora_alpha", 32), ("dropout", "lora_dropout", 0.05)):
        translation.copy_or(f"lora.{ours}", default, their)
    target = theirs.take("lora_target_modules")
    if target is not None:
        listed = target if isinstance(target, list) else str(target).split(",")
        translation.set("lora.target_modules", listed, "lora_target_modules")
    else:
        translation.default("lora.target_modules", ["q_proj", "v_proj"])
        translation.differs(
            "use_peft", "no targets are named: PEFT takes q_proj and v_proj in most models, written out"
        )
    words.experts(translation, "lora_target_parameters")
    modules = theirs.take("lora_modules_to_save")
    if modules is not None:
        translation.set(
            "lora.modules_to_save", modules if isinstance(modules, list) else [modules], "lora_modules_to_save"
        )
    translation.copy("lora.rslora", "use_rslora")
    translation.copy("lora.dora", "use_dora")
    if four:
        translation.copy("quantization.quant_type", "bnb_4bit_quant_type")
        nested = theirs.take("use_bnb_nested_quant")
        if nested is not True:
            translation.default("quantization.double_quant", False)
        else:
            translation.set("quantization.double_quant", True, "use_bnb_nested_quant")


def _data(translation: Translation) -> None:
    theirs = translation.theirs
    if not translation.copy("dataset.path", "dataset_name", "dataset_path", "train_file"):
        raise theirs.refused("dataset_name", "missing; nothing to train on")
    translation.copy("dataset.name", "dataset_config", "dataset_config_name")
    split = theirs.take("dataset_train_split")
    if split not in (None, "train"):
        translation.set("dataset.split", split, "dataset_train_split")
    field = theirs.take("dataset_text_field")
    if field:
        translation.set("dataset.format", "completion", "dataset_text_field")
        translation.set("dataset.fields", {"text": field}, "dataset_text_field")
    evaluates = str(theirs.take("eval_strategy", "evaluation_strategy", default="no"))
    test = theirs.take("dataset_test_split", default="test")
    if evaluates != "no":
        source = {key: translation.settings[f"dataset.{key}"].value for key in ("path", "name", "format", "fields")
                  if f"dataset.{key}" in translation.settings}  # fmt: skip
        translation.set("dataset.evaluation", {**source, "split": test}, "eval_strategy")
        steps = theirs.take("eval_steps")
        if evaluates == "epoch":
            translation.set("training.evals_per_epoch", 1, "eval_strategy")
        else:
            translation.set("training.eval_steps", int(steps or theirs.tree.get("logging_steps") or 10), "eval_steps")
    if not translation.copy("dataset.max_length", "max_length", "max_seq_length"):
        translation.default("dataset.max_length", 1024)
    translation.copy("dataset.packing", "packing")
    translation.copy("dataset.streaming", "dataset_streaming", "streaming")
    if template := theirs.take("chat_template_path"):
        translation.set("dataset.chat_template", template, "chat_template_path")
    answers, completion = theirs.take("assistant_only_loss") is True, theirs.take("completion_only_loss")
    if answers:
        translation.set("dataset.train_on", ["assistant"], "assistant_only_loss")
    elif completion is True:
        translation.set("dataset.train_on", ["assistant"], "completion_only_loss")
    elif not field:
        translation.default("dataset.train_on", ["all"])
        translation.differs(
            "dataset_name", "TRL learns whole conversations, and the completions of prompt and completion: "
            "write dataset.train_on: assistant for the latter"
        )  # fmt: skip


def _training(translation: Translation) -> None:
    theirs = translation.theirs
    for ours, name, default in (
        ("batch_size", "per_device_train_batch_size", 8),
        ("gradient_accumulation_steps", "gradient_accumulation_steps", 1),
        ("learning_rate", "learning_rate", 2e-5),
        ("epochs", "num_train_epochs", 3.0),
        ("save_steps", "save_steps", 500),
    ):
        translation.copy_or(f"training.{ours}", default, name)
    translation.copy("training.eval_batch_size", "per_device_eval_batch_size")
    if (steps := theirs.take("max_steps")) not in (None, -1):
        translation.set("training.max_steps", steps, "max_steps")
    if theirs.tree.get("lr_scheduler_type") is None:
        translation.default("training.lr_scheduler", "linear")
    words.schedule(translation, "lr_scheduler_type")
    words.warmup(translation)
    if not {"training.warmup_ratio", "training.warmup_steps"} & translation.settings.keys():
        translation.default("training.warmup_steps", 0)
    words.optimizer(translation, "optim")
    if theirs.tree.get("bf16") is None and not theirs.tree.get("fp16"):
        translation.default("training.precision", "bf16")
        theirs.take("bf16", "fp16", "torch_dtype", "dtype", "tf32")
    else:
        words.precision(translation)
    for name in ("weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon"):
        translation.copy(f"training.{name}", name)
    translation.copy("seed", "seed")
    again = theirs.take("gradient_checkpointing")
    word = "none" if theirs.tree.get("gradient_checkpointing") is False else "non_reentrant"
    if again is not None:
        translation.set("training.gradient_checkpointing", word, "gradient_checkpointing")
    else:
        translation.default("training.gradient_checkpointing", word)
    if theirs.take("activation_offloading") is True:
        translation.set("training.offload_activations", True, "activation_offloading")
    translation.copy_or("training.save_total_limit", None, "save_total_limit")
    if theirs.take("load_best_model_at_end") is True and "dataset.evaluation" in translation.settings:
        translation.set("training.best_checkpoint", True, "load_best_model_at_end")
    translation.copy("training.resume_from_checkpoint", "resume_from_checkpoint")
    translation.copy("training.torch_compile", "torch_compile")
    if not translation.copy("output_dir", "output_dir"):
        translation.default("output_dir", "trainer_output")


def _launch(translation: Translation) -> None:
    """DeepSpeed or FSDP, as accelerate or the script was told."""
    theirs = translation.theirs
    words.deepspeed(translation)
    words.fsdp(translation)
    config = theirs.take("accelerate_config") or {}
    kind = str(config.get("distributed_type") or "").upper()
    inner = config.get("deepspeed_config") or {}
    if kind == "DEEPSPEED":
        stage = int(inner.get("zero_stage") or 2)
        words.set_stage(
            translation, "accelerate_config", stage,
            optimizer=str(inner.get("offload_optimizer_device")) in ("cpu", "nvme"),
            parameters=str(inner.get("offload_param_device")) in ("cpu", "nvme"),
        )  # fmt: skip
    elif kind == "FSDP":
        offload = (config.get("fsdp_config") or {}).get("fsdp_offload_params") is True
        words.set_stage(translation, "accelerate_config", 3, optimizer=offload, parameters=offload)
        translation.differs(
            "accelerate_config", "FSDP's sharding becomes DeepSpeed's ZeRO stage 3, which computes the same"
        )
