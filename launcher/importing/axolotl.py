"""Translate Axolotl's YAML: its keys to our settings, and its defaults if they differ from ours."""

import re
from typing import Any

from launcher.importing import common
from launcher.importing.translation import UNSET, ForeignConfig, Translation, load_table, read_tables, split_names
from trainer.config.data_sections import SourceSection

KEYS = load_table("axolotl")
UNSUPPORTED_PLUGINS: dict[str, str] = read_tables()["axolotl_plugins"]
_TABLE = read_tables()["axolotl_sources"]
FIELDS, QUESTIONS, REFUSED = (_TABLE[name] for name in ("fields", "questions", "refused"))
PAIR_FIELDS, DROPPED, ELSEWHERE, NO_EFFECT = (
    _TABLE[name].split() for name in ("pair_fields", "dropped", "elsewhere", "none")
)
END_OF_TURN_NOTE = "only the token that ends a trained turn is trained on"


def translate(foreign: ForeignConfig) -> Translation:
    t = Translation(foreign, KEYS)
    translate_model(t)
    translate_adapter(t)
    translate_data(t)
    translate_training(t)
    each_epoch = None if t.get_setting("dataset.streaming") else ("s_per_epoch", 1)
    common.set_saves_and_evaluations(t, each_epoch, each_epoch)
    if t.get("wandb_project") and t.get("use_wandb") is not False:
        t.put("logging.report_to", ["wandb"], "wandb_project", "use_wandb")
        t.put("logging.project", t.get("wandb_project"), "wandb_project")
    if (rl := str(t.get("rl")).lower()) in (KEYS["rl"].values or ()):
        common.set_preference(t, {rl: 1.0, "sft": t.get("rpo_alpha", 0.0)}, "sequence_len", "rl", "rpo_alpha")
    elif t.get("reward_model"):
        common.set_preference(t, None, "sequence_len", "reward_model")
    else:
        t.drop("preference.", "reward.")
    common.set_distribution(t)
    return t


def translate_model(t: Translation) -> None:
    common.check_model(t, "base_model")
    if t.get("model_quantization_config") and not t.get("model_quantization_config_kwargs.dequantize"):
        t.reject("model_quantization_config", "training weights in this format is not supported; use the 16-bit model")
    for plugin in split_names(t.get("plugins")):
        for part, reason in UNSUPPORTED_PLUGINS.items():
            if f".{part}" in plugin:
                t.reject("plugins", f"{plugin}: {reason}")
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
            t.note(name, f"{', '.join(others)}: the tokenizer's tokens and the chat template's end of turn are used")


def translate_adapter(t: Translation) -> None:
    common.check_bits(t)
    loftq = t.get("peft.loftq_config") or t.get("loftq_config")
    if t.get_setting("adapter") == "none":
        if t.get("unfrozen_parameters"):
            t.reject("unfrozen_parameters", "training some of the weights is not supported; use adapter: lora")
    elif t.get("load_in_4bit") or t.get("load_in_8bit") or loftq:
        t.put("adapter", "qlora", "adapter", "load_in_4bit")
    if t.get("load_in_8bit") and not t.get("load_in_4bit") and not loftq and t.get_setting("adapter") != "none":
        t.put("quantization.quant_type", "int8", "load_in_8bit")
        t.note("load_in_8bit", common.INT8_NOTE)
    init = t.get("peft_init_lora_weights")
    if loftq or init:
        chosen = "loftq" if loftq else "default" if init is True else init
        t.put("lora.init", chosen, "peft.loftq_config", "loftq_config", "peft_init_lora_weights")
    pattern = t.get("lora_target_modules")
    common.set_default_targets(t, "adapter")
    if isinstance(pattern, str) and not re.fullmatch(r"[\w.,\s-]+", pattern) and not t.get("lora_target_linear"):
        # The language model's module path differs between versions of transformers.
        relaxed = re.sub(r"^[\w.\\]*language_model[\w.\\]*layers", ".*layers", pattern)
        t.put("lora.target_modules", [relaxed], "lora_target_modules")
    common.set_experts(t)


def translate_training(t: Translation) -> None:
    min_ratio = t.get("cosine_min_lr_ratio")
    if min_ratio is not None and not 0 <= min_ratio <= 1:
        t.reject("cosine_min_lr_ratio", "must be between 0 and 1")
    elif min_ratio == 1:
        t.put("training.lr_scheduler", "constant_with_warmup", "cosine_min_lr_ratio", "lr_scheduler")
    elif min_ratio is not None:
        t.put("training.lr_scheduler", "cosine_with_min_lr", "lr_scheduler")
        t.put("training.min_lr_ratio", min_ratio, "cosine_min_lr_ratio")
    if (total := t.get("batch_size")) and t.get("gradient_accumulation_steps"):
        t.reject("batch_size", "gradient_accumulation_steps is set as well; remove one of them")
    elif total:
        steps = max(1, total // max(1, t.get("micro_batch_size", 1)))
        t.put("training.gradient_accumulation_steps", steps, "batch_size")
    if t.get("sample_packing") and re.search(read_tables()["unpacked"], t.get("base_model", ""), re.IGNORECASE):
        t.drop("dataset.packing")
        t.note_unsupported("sample_packing", "packed documents attend to each other in this model")
    common.set_warmup(t)
    common.set_precision(t)
    checkpointing, offloading = t.get("gradient_checkpointing"), t.get("activation_offloading")
    if checkpointing or offloading:
        t.put("training.gradient_checkpointing", "non_reentrant", "gradient_checkpointing")
    if offloading or checkpointing in ("offload", "offload_disk"):
        t.put("training.offload_activations", True, "activation_offloading", "gradient_checkpointing")


def translate_data(t: Translation) -> None:
    check_media(t)
    streamed = t.get("pretraining_dataset")
    if streamed:
        (location, entry), *others = list_entries(t, "pretraining_dataset")
        if others:
            t.reject("pretraining_dataset", "only one streamed source can be imported; list all in dataset.mix")
        t.put_sources([read_source(t, {**entry, "type": "completion"}, location)], "pretraining_dataset")
    else:
        t.require("datasets", common.NO_DATA)
        t.put_sources([read_source(t, entry, location) for location, entry in list_entries(t, "datasets")], "datasets")
    if t.get("streaming", bool(streamed)):
        t.put("dataset.streaming", True, "streaming", "pretraining_dataset")
    if held_out := [read_source(t, entry, location) for location, entry in list_entries(t, "test_datasets")]:
        if len(held_out) > 1:
            t.note_unsupported("test_datasets", f"only the first of {len(held_out)} is used")
        if t.get("val_set_size"):
            t.reject("val_set_size", "test_datasets is also set; remove one of them")
        t.put("dataset.evaluation", held_out[0], "test_datasets")
        t.drop("dataset.val_split")
    elif "dataset.streaming" in t.settings and "dataset.val_split" in t.settings:
        t.drop("dataset.val_split")
        t.note_unsupported("val_set_size", "a stream cannot be split; set dataset.evaluation")
    if streamed and not t.get("excess_length_strategy"):
        t.drop("dataset.too_long")
    translate_chat_template(t)
    translate_roles(t)


def list_entries(t: Translation, name: str = "datasets") -> list[tuple[str, dict[str, Any]]]:
    value = t.get(name)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    named = ((f"{name}.{index}", entry) for index, entry in enumerate(listed))
    return [(location, {"path": entry} if isinstance(entry, str) else entry) for location, entry in named]


def check_media(t: Translation) -> None:
    """Report an error for audio, and for images if zerolora cannot train the model on images."""
    paths = " ".join(str(entry.get("path")) for _, entry in list_entries(t)).lower()
    has_processor = t.get("processor_type") and t.get("skip_prepare_dataset")
    if re.search(r"(?<![a-z])(audio|librispeech)(?![a-z])", paths):
        t.reject("datasets", common.VISION)
    elif has_processor or re.search(r"(?<![a-z])(llava|images?|vision|vqa)(?![a-z])", paths):
        common.check_images(t, "base_model")
        targets = t.get("lora_target_modules")
        if isinstance(targets, list) or re.search("vision|visual", str(targets)):  # PEFT also matches the tower
            t.put("vision.train", "lora", "lora_target_modules")
        t.note("processor_type", "only answers are trained on; images are scaled by the model's processor")


def read_source(t: Translation, entry: dict[str, Any], location: str) -> dict[str, Any]:
    if entry.get("message_field_training") in ("train", "training", "weight"):  # recognized without a setting
        entry = {key: value for key, value in entry.items() if key != "message_field_training"}
    if not entry.get("path"):
        t.report(f"{location}.path", UNSET, "missing; set it to a file, a folder or a dataset on the Hub")
    for key in REFUSED.keys() & entry.keys():
        t.report(f"{location}.{key}", entry[key], REFUSED[key])
    if dropped := [key for key in DROPPED if key in entry]:
        t.note_unsupported(location, f"{', '.join(dropped)}: records are read as they are")
    for key in ("train_on_eos", "train_on_eot"):
        if entry.get(key, "turn") != "turn":
            t.note(location, f"{key}: {entry[key]}: {END_OF_TURN_NOTE}")
    t.no_effect += [f"{location}.{key}" for key in NO_EFFECT if key in entry]
    kind = t.get("rl") or ("reward" if t.get("reward_model") else "")
    translated = read_pairs(entry, kind) if kind else read_format(t, entry.get("type"), f"{location}.type")
    turns = entry.get("message_property_mappings", {})
    fields = {name: entry[key] for key, name in FIELDS.items() if key in entry}
    fields |= {name: turns[name] for name in ("role", "content") if turns.get(name, name) != name}
    fields |= translated.pop("fields", {}) | entry.get("fields", {})
    translated |= {"fields": fields} if fields else {}
    known = {"type", "message_property_mappings", *SourceSection.model_fields, *FIELDS, *PAIR_FIELDS}
    for key in sorted(entry.keys() - known - {*REFUSED, *DROPPED, *ELSEWHERE, *NO_EFFECT}):
        t.note_unsupported(location, f"{key}: no equivalent in zerolora")
    settings = {key: value for key, value in entry.items() if key not in ("format", "fields")} | translated
    return {key: settings[key] for key in SourceSection.model_fields if key in settings}


def read_format(t: Translation, kind: Any, location: str) -> dict[str, Any]:
    if isinstance(kind, dict):
        return read_prompt(t, kind, location)
    word, _, style = str(kind or "").partition(":")
    base, _, variant = word.partition(".")
    if base == "chat_template" and (style or variant in ("", "default", "argilla", "argilla_chat")):
        return {"format": "messages"}
    if base in ("sharegpt", "completion", "pretrain"):
        return {"format": "sharegpt" if base == "sharegpt" else "completion"}
    if word == "alpaca" and (style or "instruct") in common.STYLES:
        with_input, without = common.build_alpaca_prompts(style or "instruct")
        fields = {"completion": "output"}
        return {"format": "custom", "template": with_input, "template_without_input": without, "fields": fields}
    if kind is None:
        problem = "missing, and tokenized data is not supported; set the prompt format of the data"
    else:
        problem = "this prompt format is not supported; write the records as messages, or prompt and completion"
    t.report(location, UNSET if kind is None else kind, problem)
    return {}


def read_pairs(entry: dict[str, Any], rl: str) -> dict[str, Any]:
    kind = entry.get("type")
    style = "" if isinstance(kind, dict) else str(kind or "").partition(".")[2]
    keys = {**entry, **(kind if isinstance(kind, dict) else {})}
    fields = {name.removeprefix("field_"): keys[name] for name in PAIR_FIELDS if name in keys}
    is_kto = rl.lower() == "kto"
    if is_kto and style == "argilla_chat":
        fields["messages"] = "completion"  # contains the question and answer as turns
    elif style in QUESTIONS or rl == "reward":
        fields["instruction"] = QUESTIONS.get(style, "input")
    return {"format": "unpaired" if is_kto else "preference", "fields": fields}


def read_prompt(t: Translation, kind: dict[str, str], location: str) -> dict[str, Any]:
    names = {name: kind.get(f"field_{name}", name) for name in ("instruction", "input", "output", "system")}
    head = kind.get("system_format", "{system}") if "system_prompt" in kind else ""
    head = head.replace("{system}", kind.get("system_prompt", "").replace("{", "{{").replace("}", "}}"))
    if "field_system" in kind and "system_prompt" not in kind:
        problem = "system messages in records are not supported; use {field} in template"
        t.note_unsupported(location, f"field_system: {problem}")
    with_input = head + kind.get("format", "{instruction} {input} ")
    without = head + kind.get("no_input_format", "{instruction} ")
    fields = {name: names[name] for name in ("instruction", "input") if names[name] != name}
    fields = {name: field for name, field in fields.items() if f"{{{name}}}" in with_input + without}
    source: dict[str, Any] = {"format": "custom", "template": with_input}
    if "{input}" in with_input:
        source["template_without_input"] = without
    return source | {"fields": fields | {"completion": names["output"]}}


def read_shared_key(t: Translation, name: str) -> tuple[Any, str]:
    """Return the value of a key that must be the same for all sources, and the dotted name of the key that sets it."""
    if t.get(name):
        return t.get(name), name
    values = [(entry[name], f"{location}.{name}") for location, entry in list_entries(t) if name in entry]
    if any(value != values[0][0] for value, _ in values):
        t.reject("datasets", f"{name} differs between sources; it must be the same for all")
    return values[0] if values else (None, "datasets")


def translate_chat_template(t: Translation) -> None:
    common.set_thinking(t)
    jinja, jinja_location = read_shared_key(t, "chat_template_jinja")
    name, name_location = read_shared_key(t, "chat_template")
    is_used = any("chat_template" in str(entry.get("type")) for _, entry in list_entries(t))
    if jinja:
        t.put("dataset.chat_template", jinja, jinja_location)
    elif is_used and name in common.CHAT_TEMPLATES and not t.has_images:
        t.put("dataset.chat_template", common.CHAT_TEMPLATES[name], name_location)
    elif is_used and name not in (None, "tokenizer_default"):
        t.note(name_location, f"{name}: {common.TOKENIZER_TEMPLATE_NOTE}")


def translate_roles(t: Translation) -> None:
    roles, location = read_shared_key(t, "roles_to_train")
    if roles and not t.get("train_on_inputs"):
        trained = dict.fromkeys({"gpt": "assistant", "human": "user"}.get(role, role) for role in split_names(roles))
        t.put("dataset.train_on", list(trained), location)
    for name in ("train_on_eos", "train_on_eot"):
        if t.get(name, "turn") != "turn":
            t.note(name, f"{t.get(name)}: {END_OF_TURN_NOTE}")
