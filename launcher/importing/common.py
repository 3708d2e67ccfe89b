"""Translation rules shared by Axolotl, LLaMA-Factory and TRL, which accept many of transformers' arguments."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from launcher.importing.translation import (
    Translation,
    convert,
    is_off,
    load_table,
    parse_kind,
    read_tables,
    split_names,
)
from trainer.config import UserError, aliases
from trainer.config.errors import to_text
from trainer.config.files import read_json
from trainer.config.sections import TRACKERS
from trainer.config.yaml_core import Yaml11Loader, read_yaml

REASONS: dict[str, str] = read_tables()["reasons"]
VISION = REASONS["vision"]
TEXT_ONLY_MODEL_PATTERN = read_tables()["unread_images"].replace(" ", "")
"""Pattern for the names of models that zerolora trains on text only."""
NO_DATA = "set it to the data to train on"
INT8_NOTE = (
    "weights (per row), inputs (per token) and matmuls are int8, without LLM.int8's 16-bit outliers; on Hopper "
    "and Ada quantization.quant_type: fp8 is faster"
)
TOKENIZER_TEMPLATE_NOTE = "the tokenizer's chat template is used; base models may have none"
PREFERENCE_LOSSES = load_table("llamafactory")["pref_loss"].values or {}
STYLES: dict[str, tuple[str, str, str]] = read_tables()["alpaca_styles"]
CHAT_TEMPLATES: dict[str, str] = aliases.split_names(read_tables()["chat_templates"])

SHARDING_CONFIG = parse_kind(read_tables()["types"]["partition"])
FSDP_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
FSDP_VALUES = {*map(str.lower, FSDP_STAGES), "offload", "auto_wrap", "true"}
ATTENTION_PATTERN = r"eager|sdpa|(paged\|)?flash_attention_\d|flex_attention|xformers|sage|s2|fp8|[\w.|-]+/.+"

Interval = tuple[str, float]
"""("steps", N) for every N steps, or ("s_per_epoch", N) for N times per epoch."""


def build_alpaca_prompts(style: str) -> tuple[str, str]:
    """Return Stanford Alpaca's prompt templates for records with and without an input."""
    system, *turns = STYLES[style]
    with_input, without = (
        system.replace("{system}", text) + turn for text, turn in zip(read_tables()["alpaca"], turns, strict=True)
    )
    return with_input, without


def set_preference(t: Translation, losses: Mapping[str, float] | None, max_length_key: str, *names: str) -> None:
    """Set preference training with weighted losses, or a reward model if `losses` is None.

    `max_length_key` is the other trainer's key for the maximum length. It applies to a prompt with one answer, and ours
    to a prompt with both answers, so the value is doubled.
    """
    for name in names:
        if isinstance(weight := t.get(name), int | float) and weight < 0:
            t.reject(name, "must be 0 or more")
    t.put("task", "reward" if losses is None else "preference", *names)
    t.drop("preference." if losses is None else "reward.")
    if losses is not None:
        weights = {loss: weight for loss, weight in losses.items() if weight > 0}
        t.put("preference.loss", next(iter(weights)) if [*weights.values()] == [1.0] else weights, *names)
    t.drop("dataset.train_on", "dataset.too_long")
    if (max_length := t.get_setting("dataset.max_length")) is not None:
        t.put("dataset.max_length", 2 * max_length, max_length_key)
        t.note(max_length_key, "doubled, because dataset.max_length counts both answers of a pair")


def check_model(t: Translation, name: str) -> None:
    t.require(name, "set it to a model")
    model = str(t.get(name, ""))
    if match := re.search(r"(?<![A-Za-z])(AQLM|EETQ|HQQ)(?![A-Za-z])", model, re.IGNORECASE):
        t.reject(name, f"{match.group(1)} weights are not supported; use the 16-bit model")


def check_images(t: Translation, name: str) -> None:
    """Reject models that zerolora cannot train on images, recognized by their names."""
    t.has_images = True
    if re.search(TEXT_ONLY_MODEL_PATTERN, str(t.get(name, "")), re.IGNORECASE):
        t.reject(name, REASONS["images"])


def set_warmup(t: Translation, default: int | None = None) -> None:
    """Set the warm-up, in steps or as a fraction of all steps. warmup_steps below 1 is a fraction."""
    steps, ratio = t.get("warmup_steps"), t.get("warmup_ratio")
    if steps and 0 < steps < 1:
        t.put("training.warmup_ratio", steps, "warmup_steps")
    elif steps is not None and not (steps == 0 and ratio is not None):
        t.put("training.warmup_steps", steps, "warmup_steps")
    elif ratio is not None:
        t.put("training.warmup_ratio", ratio, "warmup_ratio")
    elif default is not None:
        t.put("training.warmup_steps", default)


def set_precision(t: Translation, default: str = "auto") -> None:
    bf16, fp16 = t.get_first("bf16", "bfloat16"), t.get_first("fp16", "float16")
    if bf16 in (True, "full") and fp16:
        t.reject("fp16" if t.get("fp16") else "float16", "bf16 is also set; remove one of them")
    if t.get("pure_bf16") or bf16 in (True, "full"):
        chosen = "bf16"
    elif bf16 == "auto" or (bf16 is None and not fp16):
        chosen = "auto" if bf16 else default
    else:
        chosen = "fp16" if fp16 else "fp32"
    t.put("training.precision", chosen, "pure_bf16", "bf16", "bfloat16", "fp16", "float16")


def set_attention(t: Translation, *names: str) -> None:
    """Set the attention implementation: keep eager and sdpa; replace others with auto, which gives the same results."""
    name = next((name for name in names if not is_off(t.get(name)) and t.get(name) not in (True, "auto")), None)
    if name is None:
        return
    if not re.fullmatch(ATTENTION_PATTERN, str(t.get(name))):
        t.reject(name, "must be eager, sdpa, flash_attention_2 or _3, flex_attention, or a kernel from the Hub")
    is_plain = t.get(name) in ("eager", "sdpa")
    t.put("model.attn_implementation", t.get(name) if is_plain else "auto", name)
    if not is_plain:
        t.note(name, f"{t.get(name)} becomes auto, which uses the fastest kernel for the same result")


def check_bits(t: Translation) -> None:
    """Reject load_in_4bit together with load_in_8bit, as bitsandbytes does."""
    if t.get("load_in_4bit") and t.get("load_in_8bit"):
        t.reject("load_in_8bit", "load_in_4bit is also set; remove one of them")


def set_quantization_bits(t: Translation, name: str) -> None:
    bits = t.get(name)
    if bits not in (None, 4, 8):
        t.reject(name, "must be 4 or 8; for 16 bits, remove it")
    elif bits and t.get_setting("adapter") == "lora":
        t.put("adapter", "qlora", name, "finetuning_type", "peft_config.name")
    if bits == 8 and t.get_setting("adapter") == "qlora":
        t.put("quantization.quant_type", "int8", name)
        t.note(name, INT8_NOTE)


def set_default_targets(t: Translation, name: str) -> None:
    if t.get_setting("adapter") == "none" or "lora.target_modules" in t.settings:
        return
    if parameters := split_names(t.get("lora_target_parameters")):  # PEFT has no other default for most MoE models
        modules = sorted({parameter.rpartition(".")[0] for parameter in parameters})
        t.put("lora.target_modules", modules, "lora_target_parameters")
    else:
        t.put("lora.target_modules", ["q_proj", "v_proj"])
        t.note(name, "no targets are set; q_proj and v_proj are used, PEFT's default for most models")


def set_experts(t: Translation) -> None:
    """Adapt fused experts (stored as one tensor) only if they are named: PEFT's all-linear excludes them.

    Also removes targets that the model, recognized by name, does not have; PEFT ignores them, zerolora rejects them.
    """
    targets, names = t.settings.get("lora.target_modules", ((), ()))
    for pattern, layers in read_tables()["absent_layers"].items():
        found = re.search(pattern, str(t.get_setting("base_model")), re.IGNORECASE)
        if names and found and (absent := [layer for layer in layers.split() if layer in targets]):
            t.put("lora.target_modules", [name for name in targets if name not in absent], *names)
            t.note(names[0], f"{', '.join(absent)}: this model has no such layers, and PEFT ignores them")
    if parameters := split_names(t.get("lora_target_parameters")):
        t.put("lora.target_parameters", parameters, "lora_target_parameters")
    elif split_names(t.get_setting("lora.target_modules")) in (["all"], ["all-linear"]):
        t.put("lora.experts", False)


def set_interval(t: Translation, kind: Literal["save", "eval"], default: Interval | None) -> None:
    strategy = t.get_first(f"{kind}_strategy", "evaluation_strategy" if kind == "eval" else "")
    steps, per_epoch = t.get(f"{kind}_steps"), t.get(f"{kind}s_per_epoch")
    for key in (f"{kind}_steps", f"{kind}s_per_epoch"):
        if strategy != "no" and t.get(key, 0) < 0:
            t.reject(key, "must be 0 or more")
    if steps and per_epoch:
        t.reject(f"{kind}s_per_epoch", f"{kind}_steps is also set; remove one of them")
    chosen = default
    if strategy == "no" or per_epoch == 0 or steps == 0:
        chosen = ("steps", 0)
    elif strategy == "epoch":
        chosen = ("s_per_epoch", 1)
    elif steps or per_epoch:
        chosen = ("steps", steps) if steps else ("s_per_epoch", per_epoch)
    names = (f"{kind}_steps", f"{kind}s_per_epoch", f"{kind}_strategy", "evaluation_strategy")
    if chosen and chosen[0] != "steps" and t.get_setting("dataset.streaming"):
        if name := next((name for name in names if t.get(name) is not None), None):
            t.note_unsupported(name, f"the length of a stream is unknown; set training.{kind}_steps")
    elif chosen:
        setting = f"training.{kind}{'_' * (chosen[0] == 'steps')}{chosen[0]}"
        t.put(setting, chosen[1], *(names if kind == "eval" else names[:3]))


def set_saves_and_evaluations(t: Translation, saves: Interval | None, evaluations: Interval | None) -> None:
    set_interval(t, "save", saves)
    has_held_out_data = bool({"dataset.val_split", "dataset.evaluation"} & t.settings.keys())
    set_interval(t, "eval", evaluations)
    if not has_held_out_data:
        t.drop("training.eval_steps", "training.evals_per_epoch")
    if t.get("save_strategy") == "best":
        t.put("training.best_checkpoint", True, "save_strategy")
    if not has_held_out_data or t.get_setting("dataset.streaming"):
        t.drop("training.best_checkpoint", "training.early_stopping")


def set_training(t: Translation, precision: str, evaluation: Interval | None) -> None:
    set_warmup(t, default=0)
    options, peak = t.get("lr_scheduler_kwargs", {}), t.get_setting("training.learning_rate")
    schedule, steps = t.get_setting("training.lr_scheduler"), t.get_setting("training.max_steps")
    ratio = options.get("min_lr_rate", options["min_lr"] / peak if "min_lr" in options and peak else None)
    if ratio is not None and schedule == "cosine_with_min_lr":
        t.put("training.min_lr_ratio", ratio, *(f"lr_scheduler_kwargs.{name}" for name in ("min_lr_rate", "min_lr")))
    if schedule == "cosine_with_restarts":
        t.put("training.lr_cycles", options.get("num_cycles", 1), "lr_scheduler_kwargs.num_cycles")
    elif schedule == "warmup_stable_decay":
        t.put("training.min_lr_ratio", options.get("min_lr_ratio", 0.0), "lr_scheduler_kwargs.min_lr_ratio")
        if "num_decay_steps" in options and steps:
            t.put("training.decay_ratio", min(1.0, options["num_decay_steps"] / steps), "lr_scheduler_kwargs")
    if (factor := t.get("label_smoothing_factor")) and t.get_setting("training.loss") in (None, "nll"):
        t.put("training.loss", "label_smoothing", "label_smoothing_factor")
        t.put("training.label_smoothing", factor, "label_smoothing_factor")
    set_precision(t, precision)
    set_saves_and_evaluations(t, ("steps", 500), evaluation)
    names = split_names(t.get("report_to"))
    if names and "all" not in names:
        known = ("tensorboard", *TRACKERS)
        t.put("logging.report_to", [name for name in names if name in known] or "none", "report_to")
        if others := [name for name in names if name not in (*known, "none")]:
            t.note_unsupported("report_to", f"{', '.join(others)}: only {', '.join(known)} are supported")


def set_thinking(t: Translation) -> None:
    names = [name for name in ("enable_thinking", "preserve_thinking") if t.get(name) is not None]
    if arguments := t.get("chat_template_kwargs", {}) | {name: t.get(name) for name in names}:
        t.put("dataset.chat_template_kwargs", arguments, "chat_template_kwargs", *names)


def set_distribution(t: Translation) -> None:
    """Set the ZeRO stage from a DeepSpeed or FSDP configuration; default to 0 if the optimizer needs full matrices."""
    options = t.get("fsdp_config")
    if options is not None or not is_off(t.get("fsdp")):
        name = "fsdp" if options is None else "fsdp_config"
        if isinstance(options, str):
            if t.foreign.find_file(options) is None:
                t.reject(name, "no such file; copy it here, or nest its keys under fsdp_config")
            options = read_file(t, name, options, SHARDING_CONFIG["fsdp_config"])
        convert_fsdp(t, name, options or {})
        if not is_off(t.get("deepspeed")):
            t.reject("deepspeed", f"{name} is set as well; remove one of them")
    if (value := t.get("deepspeed")) is not None:
        set_sharding(t, "deepspeed", value)
    if t.get_setting("training.optimizer") in ("adafactor", "muon") and "zero.stage" not in t.settings:
        t.put("zero.stage", 0)


def read_file(t: Translation, name: str, path: str, kind: Any) -> Any:
    """Read a YAML or JSON file as `kind`, or return None. If it is invalid, also report an error for key `name`."""
    file = t.foreign.find_file(path)
    if file is None:
        return None
    try:
        content = read_yaml(file, Yaml11Loader).tree if file.suffix in (".yaml", ".yml") else read_json(file, Any)
    except UserError as error:
        t.reject(name, str(error))
        return None
    return convert_part(t, name, path, "", kind, content)


def convert_part(t: Translation, name: str, path: str, location: str, kind: Any, value: Any) -> Any:
    """Convert part of a file to `kind`; if it does not match, report an error for key `name` and return None."""
    problems: list[str] = []

    def report(inner: str, part: Any, problem: str) -> None:
        problems.append(f"{path}: {inner.removeprefix('.')}={to_text(part, 40)}: {problem}".replace(": =", ": "))

    converted = convert(kind, value, location, report)
    if problems:
        t.reject(name, problems[0])
    return None if problems else converted


def set_sharding(t: Translation, name: str, value: Any) -> None:
    """Set the ZeRO stage and offloading from a DeepSpeed or accelerate configuration, given as a mapping or a path."""
    value = read_sharding_config(t, name, value)
    options = (value or {}).get("deepspeed_config", {})
    if "deepspeed_config_file" in options:
        value = read_sharding_config(t, name, options["deepspeed_config_file"])
    if value is None:
        return
    launcher, zero = str(value.get("distributed_type")).upper(), value.get("zero_optimization", {})
    if launcher == "FSDP":
        convert_fsdp(t, name, value.get("fsdp_config", {}))
    elif launcher == "DEEPSPEED":
        offload = [options.get(f"offload_{part}_device") for part in ("optimizer", "param")]
        set_stage(t, name, options.get("zero_stage", 2), offload)
    elif "distributed_type" not in value:
        offload = [zero.get(f"offload_{part}", {}).get("device") for part in ("optimizer", "param")]
        set_stage(t, name, zero.get("stage", 0), offload)


def read_sharding_config(t: Translation, name: str, value: Any) -> Any:
    """Return a DeepSpeed, FSDP or accelerate configuration, given as a mapping or a path.

    Returns None if the file is missing or invalid. If it is missing, sets the ZeRO stage from the file's name.
    """
    if not isinstance(value, str):
        return value
    content = read_file(t, name, value, SHARDING_CONFIG)
    if content is None and t.foreign.find_file(value) is None:
        set_stage_by_name(t, name, value)
    return content


def set_stage_by_name(t: Translation, name: str, path: str) -> None:
    """Set the ZeRO stage and offloading from the name of a missing file, such as one provided by TRL or accelerate."""
    match = re.search(r"(?:zero|z|stage)[_-]?([0-3])", path, re.IGNORECASE)
    if "fsdp" in path:
        convert_fsdp(t, name, {})
    elif match is not None:
        offload = ["cpu" if re.search("offload", path, re.IGNORECASE) else None] * 2
        set_stage(t, name, int(match.group(1)), offload)
        t.note(name, f"the file does not exist; using stage {match.group(1)}, as its name suggests")
    elif not re.search(r"(single|multi)_gpu", path):
        t.reject(name, "no such file, and its name has no ZeRO stage; copy the file here")


def set_stage(t: Translation, name: str, stage: int, offload: Sequence[str | None]) -> None:
    """Set the ZeRO stage and offloading; `offload` has the devices for the optimizer and the parameters."""
    optimizer, parameters = (device in ("cpu", "nvme") for device in offload)
    t.put("zero.stage", stage, name)
    if optimizer and stage:
        t.put("zero.offload_optimizer", True, name)
        if t.get_setting("training.optimizer") in ("adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"):
            t.put("training.optimizer", "adamw", name)
            t.note(name, "with offloading, the optimizer is torch's AdamW with 32-bit state")
    if stage == 3 and "training.torch_compile" in t.settings:
        t.drop("training.torch_compile")
        t.note_unsupported("torch_compile", "stage 3's gathers break the graph at every layer")
    if parameters and stage == 3:
        t.put("zero.offload_parameters", True, name)


def convert_fsdp(t: Translation, name: str, config: Mapping[str, Any]) -> None:
    """Set the ZeRO stage from FSDP's sharding: full sharding becomes stage 3, gradient sharding stage 2."""
    settings = {key.removeprefix("fsdp_"): value for key, value in config.items()}
    fsdp_values = [] if is_off(t.get("fsdp")) else " ".join(split_names(t.get("fsdp"))).lower().split()
    if unknown := [value for value in fsdp_values if value not in FSDP_VALUES]:
        t.reject("fsdp", f"{unknown[0]}: must be one of {', '.join(sorted(FSDP_VALUES))}")
    named_sharding = next((value for value in fsdp_values if value.upper() in FSDP_STAGES), "FULL_SHARD")
    sharding = str(settings.get("sharding_strategy", named_sharding)).upper()
    sharding = [*FSDP_STAGES][int(sharding) - 1] if sharding in [*"12345"] else sharding
    if sharding not in FSDP_STAGES:
        t.reject(name, f"sharding_strategy={sharding}: must be one of {', '.join(FSDP_STAGES)}, or 1 to 5")
    stage = 2 if is_off(settings.get("reshard_after_forward", True)) else FSDP_STAGES.get(sharding, 3)
    offloads = settings.get("offload_params") or "offload" in fsdp_values
    set_stage(t, name, stage, ["cpu" if offloads else None] * 2)
    t.note(name, f"FSDP's sharding becomes DeepSpeed's ZeRO stage {stage}, which is equivalent")
    if settings.get("activation_checkpointing"):
        t.put("training.gradient_checkpointing", "non_reentrant", name)
