"""Axolotl's YAML: our settings for its keys, and its defaults where they differ from ours."""

import re

from launcher.importing import common
from launcher.importing.axolotl_sources import set_data
from launcher.importing.translation import Foreign, Translation, load_table, read_tables, split_names

KEYS = load_table("axolotl")
PLUGINS_REFUSED: dict[str, str] = read_tables()["axolotl_plugins"]


def translate(foreign: Foreign) -> Translation:
    """Return our settings for a configuration of Axolotl."""
    t = Translation(foreign, KEYS)
    set_model(t)
    set_adapter(t)
    set_data(t)
    set_training(t)
    set_saves_and_evaluations(t)
    if (rl := str(t.get("rl")).lower()) in (KEYS["rl"].values or ()):
        common.set_preference(t, {rl: 1.0, "sft": t.get("rpo_alpha", 0.0)}, "sequence_len", "rl", "rpo_alpha")
    elif t.get("reward_model"):
        common.set_preference(t, None, "sequence_len", "reward_model")
    else:
        t.drop("preference.", "reward.")
    common.set_distribution(t)
    return t


def set_model(t: Translation) -> None:
    """Set the base model and its tokens; refuse unsupported bases and plugins."""
    common.name_model(t, "base_model")
    if t.get("model_quantization_config") and not t.get("model_quantization_config_kwargs.dequantize"):
        t.refuse("model_quantization_config", "the base stays as it is stored; take the 16-bit model")
    for plugin in split_names(t.get("plugins")):
        for part, reason in PLUGINS_REFUSED.items():
            if f".{part}" in plugin:
                t.refuse("plugins", f"{plugin}: {reason}")
    common.set_attention(
        t, "attn_implementation", "flash_attention", "xformers_attention", "sdp_attention", "flex_attention",
        "eager_attention", "sage_attention",
    )  # fmt: skip
    if isinstance(t.get("tokens"), list):
        t.put("model.added_tokens", t.get("tokens"), "tokens")
    elif t.get("tokens", {}).get("pad_token"):
        t.put("model.pad_token", t.get("tokens")["pad_token"], "tokens")
    for name in ("tokens", "special_tokens"):
        tokens = t.foreign.tree.get(name)
        if others := [str(token) for token in tokens if token != "pad_token"] if isinstance(tokens, dict) else []:
            t.note(name, f"{', '.join(others)}: the tokenizer's own are kept; the template ends chats")


def set_adapter(t: Translation) -> None:
    """Set the bits of the base, where the adapter starts, and which layers get one."""
    loftq = t.get("peft.loftq_config") or t.get("loftq_config")
    if t.get_setting("adapter") == "none":
        if t.get("unfrozen_parameters"):
            t.refuse("unfrozen_parameters", "training a part of the weights is not supported; use adapter: lora")
    elif t.get("load_in_4bit") or t.get("load_in_8bit") or loftq:
        t.put("adapter", "qlora", "adapter", "load_in_4bit")
    if t.get("load_in_8bit") and not t.get("load_in_4bit") and not loftq and t.get_setting("adapter") != "none":
        t.put("quantization.quant_type", "int8", "load_in_8bit")
        t.note("load_in_8bit", common.INT8)
    start = t.get("peft_init_lora_weights")
    if loftq or start:
        chosen = "loftq" if loftq else "default" if start is True else start
        t.put("lora.init", chosen, "peft.loftq_config", "loftq_config", "peft_init_lora_weights")
    pattern = t.get("lora_target_modules")
    common.set_default_targets(t, "adapter")
    if isinstance(pattern, str) and not re.fullmatch(r"[\w.,\s-]+", pattern) and not t.get("lora_target_linear"):
        found = find_names(pattern)
        t.put("lora.target_modules", found or [pattern], "lora_target_modules")
        if found:
            t.note("lora_target_modules", "the pattern becomes these names, in the language model only")
    common.set_experts(t)


def find_names(pattern: str) -> list[str]:
    """Return the module names at the end of a pattern of paths, such as `(q|k)_proj` and `o_proj`."""
    groups = re.findall(r"\(([\w|]+)\)(_proj)", pattern)
    single = re.findall(r"(?<![\w|)])(\w+_proj)\b", pattern)
    return list(dict.fromkeys([part + end for parts, end in groups for part in parts.split("|")] + single))


def set_training(t: Translation) -> None:
    """Set batches, schedule, precision and recomputation."""
    min_ratio = t.get("cosine_min_lr_ratio")
    if min_ratio is not None and min_ratio >= 1:
        t.put("training.lr_scheduler", "constant_with_warmup", "cosine_min_lr_ratio", "lr_scheduler")
    elif min_ratio is not None:
        t.put("training.lr_scheduler", "cosine_with_min_lr", "lr_scheduler")
        t.put("training.min_lr_ratio", min_ratio, "cosine_min_lr_ratio")
    common.set_warmup(t)
    common.set_precision(t)
    checkpointing, offloading = t.get("gradient_checkpointing"), t.get("activation_offloading")
    if checkpointing or offloading:
        t.put("training.gradient_checkpointing", "non_reentrant", "gradient_checkpointing")
    if offloading or checkpointing in ("offload", "offload_disk"):
        t.put("training.offload_activations", True, "activation_offloading", "gradient_checkpointing")


def set_saves_and_evaluations(t: Translation) -> None:
    """Set when to save and evaluate (once an epoch by default), when to stop, and where to report."""
    each_epoch = None if t.get_setting("dataset.streaming") else ("s_per_epoch", 1)
    common.set_saves_and_evaluations(t, each_epoch, each_epoch)
    if t.get("wandb_project") and t.get("use_wandb") is not False:
        t.put("logging.report_to", ["wandb"], "wandb_project", "use_wandb")
        t.put("logging.project", t.get("wandb_project"), "wandb_project")
