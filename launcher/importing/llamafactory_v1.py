"""LLaMA-Factory's second layout (`USE_V1`): `model`, `peft_config`, `train_dataset` with a YAML of its own."""

from pathlib import Path
from typing import Any

from launcher.importing import common_words as words
from launcher.importing.translation import Setting, Theirs, Translation
from trainer.config.yaml_core import read_yaml

CONVERTERS = {"alpaca": "alpaca", "sharegpt": "messages"}
WITHOUT_EFFECT = (
    "model_class kernel_config init_config sample_backend max_new_tokens batching_workers dist_timeout logging_steps "
    "flash_attn save_ckpt_as_hf dp_size mp_replicate_size mp_shard_size cp_mode template"
).split()


def translate(theirs: Theirs) -> Translation:
    """Ours from the second layout. Raises Refused for what is not offered here."""
    translation = Translation(theirs)
    if not translation.copy("base_model", "model"):
        raise theirs.refused("model", "missing; a model must be named")
    if found := words.QUANTIZED_NAMES.search(str(theirs.tree["model"])):
        raise theirs.refused("model", f"its weights are in {found.group(1)}; name the 16-bit model")
    translation.copy("model.trust_remote_code", "trust_remote_code")
    translation.copy("dataset.chat_template", "custom_chat_template")
    _adapter(translation)
    _data(translation)
    _training(translation)
    translation.finish(WITHOUT_EFFECT, ("pref_", "ld_", "dpo_", "simpo_"))
    return translation


def _adapter(translation: Translation) -> None:
    theirs = translation.theirs
    peft, quantised = theirs.take("peft_config") or {}, theirs.take("quant_config") or {}
    kind = peft.get("name", "full")
    if kind not in ("lora", "full"):
        raise theirs.refused("peft_config", f"{kind}: adapters here are LoRA's; or all weights are trained")
    if kind == "full":
        translation.settings["adapter"] = Setting("none", "no peft_config")
        return
    translation.set("adapter", "qlora" if quantised.get("quantization_bit") in (4, 8) else "lora", "peft_config")
    if quantised.get("quantization_bit") == 8:
        translation.set("quantization.quant_type", "int8", "quant_config")
        translation.differs("quant_config", words.INT8)
    for ours, name in (("r", "r"), ("alpha", "lora_alpha"), ("dropout", "lora_dropout"), ("rslora", "use_rslora"),
                       ("dora", "use_dora"), ("modules_to_save", "modules_to_save")):  # fmt: skip
        if peft.get(name) is not None:
            translation.set(f"lora.{ours}", peft[name], "peft_config")
    target = peft.get("target_modules", "all")
    chosen = ["all-linear"] if target in ("all", "all-linear") else target if isinstance(target, list) else [target]
    translation.set("lora.target_modules", chosen, "peft_config")
    words.experts(translation)
    if peft.get("adapter_name_or_path"):
        translation.set("lora.adapter_path", peft["adapter_name_or_path"], "peft_config")


def _data(translation: Translation) -> None:
    theirs = translation.theirs
    sources = _sources(translation, "train_dataset")
    if len(sources) == 1:
        for key, value in sources[0].items():
            translation.set(f"dataset.{key}", value, "train_dataset")
    else:
        translation.set("dataset.mix", sources, "train_dataset")
    if theirs.tree.get("eval_dataset"):
        translation.set("dataset.evaluation", _sources(translation, "eval_dataset")[0], "eval_dataset")
    translation.copy_or("dataset.max_length", 2048, "cutoff_len")
    way = str(theirs.take("batching_strategy", default="normal"))
    if way != "normal":
        translation.set("dataset.packing", True, "batching_strategy")
        translation.differs("batching_strategy", f"{way}: documents are packed to the length of a sequence")


def _sources(translation: Translation, name: str) -> list[dict[str, Any]]:
    theirs = translation.theirs
    value = str(theirs.take(name))
    file = next(
        (path for folder in (theirs.folder, *theirs.folder.parents) if (path := folder / value).is_file()), None
    )
    if file is None:
        return [{"path": value}] if not value.endswith((".yaml", ".yml")) else _missing(theirs, name, value)
    if file.suffix not in (".yaml", ".yml"):
        return [{"path": str(file)}]
    return [_source(translation, file, entry, name) for entry in read_yaml(file).tree.values()]


def _missing(theirs: Theirs, name: str, value: str) -> list[dict[str, Any]]:
    raise theirs.refused(name, f"no {value} beside this file or above it, which says what the data is; put it there")


def _source(translation: Translation, file: Path, entry: Any, name: str) -> dict[str, Any]:
    theirs = translation.theirs
    kind = entry.get("converter") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not entry.get("path") or kind not in (None, *CONVERTERS):
        reason = "preference and reward training are not offered" if kind == "pair" else f"{file}: not understood"
        raise theirs.refused(name, reason)
    path = str(entry["path"])
    if entry.get("source") == "local":
        path = str(next((at for folder in file.parents if (at := folder / path).exists()), path))
    source: dict[str, Any] = {"path": path}
    if entry.get("split"):
        source["split"] = entry["split"]
    if kind:
        source["format"] = CONVERTERS[kind]
    if entry.get("size"):
        source["max_samples"] = int(entry["size"])
    return source


def _training(translation: Translation) -> None:
    theirs = translation.theirs
    for ours, name, default in (
        ("batch_size", "micro_batch_size", 1),
        ("learning_rate", "learning_rate", 1e-4),
        ("epochs", "num_train_epochs", 3),
    ):
        translation.copy_or(f"training.{ours}", default, name)
    translation.copy("training.global_batch_size", "global_batch_size")
    translation.copy("training.max_steps", "max_steps")
    translation.copy("training.max_grad_norm", "max_grad_norm")
    course = theirs.take("lr_scheduler_config") or {}
    if course:
        raise theirs.refused("lr_scheduler_config", "write training.lr_scheduler by hand: the plug-in is not known")
    translation.default("training.lr_scheduler", "constant")
    translation.default("training.warmup_steps", 0)
    chosen = theirs.take("optim_config") or {}
    if str(chosen.get("name", "adamw")).lower() not in words.ADAMW:
        raise theirs.refused("optim_config", "only AdamW is offered, in 32 and 8 bits")
    translation.default("training.weight_decay", chosen.get("weight_decay", 0.01))
    if "bf16" in theirs.tree:
        words.precision(translation)
    else:
        translation.default("training.precision", "bf16")
    again = theirs.take("enable_activation_checkpointing")
    off = theirs.tree.get("enable_activation_checkpointing") is False
    translation.default("training.gradient_checkpointing", "none" if off and not again else "non_reentrant")
    translation.copy("seed", "seed")
    every = theirs.take("save_steps")
    if every:
        translation.set("training.save_steps", every, "save_steps")
    elif theirs.take("save_epochs"):
        translation.set("training.saves_per_epoch", round(1 / float(theirs.tree["save_epochs"]), 6), "save_epochs")
    else:
        translation.default("training.save_steps", 0)
    translation.copy_or("training.save_total_limit", None, "save_total_limit")
    translation.copy_or("output_dir", "runs/llamafactory", "output_dir")
    translation.copy("training.resume_from_checkpoint", "resume_from_checkpoint")
    _partition(translation)


def _partition(translation: Translation) -> None:
    theirs = translation.theirs
    placed = theirs.take("dist_config") or {}
    kind = str(placed.get("name", ""))
    if kind == "deepspeed" and placed.get("config_file"):
        theirs.tree["deepspeed"] = placed["config_file"]
        words.deepspeed(translation)
    elif kind.startswith("fsdp"):
        words.set_stage(translation, "dist_config", 3, optimizer=False, parameters=False)
        translation.differs("dist_config", "FSDP's sharding becomes DeepSpeed's ZeRO stage 3, which computes the same")
    if int(theirs.take("cp_size", default=1)) > 1:
        translation.differs("cp_size", "every GPU holds whole sequences, which takes more memory and gives the same")
