"""Translate LLaMA-Factory's YAML and dataset_info.json: their keys and defaults to our settings."""

import re
from pathlib import Path
from typing import Any

from launcher.importing import common
from launcher.importing.translation import ForeignConfig, Translation, load_table, parse_kind, read_tables, split_names

KEYS = load_table("llamafactory")
V1_KEYS = load_table("llamafactory_v1")
V1_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "pair": "preference"}
"""Converter in the v1 layout (USE_V1=1) -> our format."""
_TABLES = read_tables()
TURNS, ROLES = (_TABLES["llamafactory_formats"][name] for name in ("turns", "roles"))
ENTRY_TYPE = parse_kind(_TABLES["types"]["llamafactory_source"])
"""Type of an entry in dataset_info.json."""
V1_SOURCES = parse_kind(_TABLES["types"]["llamafactory_v1_sources"])


def translate(foreign: ForeignConfig) -> Translation:
    is_v1 = "train_dataset" in foreign.tree or isinstance(foreign.tree.get("peft_config"), dict)
    t = (translate_v1 if is_v1 else translate_v0)(foreign)
    if "output_dir" not in t.settings:
        t.put("output_dir", "runs/" + re.sub(r"[^\w.-]+", "-", str(t.get_setting("base_model"))))
    return t


def translate_v0(foreign: ForeignConfig) -> Translation:
    t = Translation(foreign, KEYS)
    common.check_model(t, "model_name_or_path")
    if t.get("do_train") is False:
        t.reject("do_train", common.REASONS["nothing_trained"])
    if t.get("use_muon"):  # LLaMA-Factory then ignores optim
        t.put("training.optimizer", "muon", "use_muon")
    translate_adapter(t)
    translate_data(t)
    common.set_training(t, "auto", None)
    common.set_distribution(t)
    if t.get("stage") == "dpo":
        set_losses(t, "stage")
    elif t.get("stage") == "rm":
        common.set_preference(t, None, "cutoff_len", "stage")
        t.note("stage", "the reward model gets a new score head without a bias, not a value head")
    elif t.get("stage") == "kto":
        common.set_preference(t, {"kto": 1.0}, "cutoff_len", "stage")
    else:
        t.drop("preference.", "reward.")
    return t


def translate_v1(foreign: ForeignConfig) -> Translation:
    """Translate the v1 layout (USE_V1=1), in which PEFT, quantization and distribution are mappings."""
    t = Translation(foreign, V1_KEYS)
    common.check_model(t, "model")
    common.set_quantization_bits(t, "quant_config.quantization_bit")
    if t.get("quant_config.name") == "bnb" and t.get("quant_config.quantization_bit") is None:
        t.put("adapter", "qlora", "quant_config.name")  # 4-bit by default
    common.set_experts(t)
    common.set_attention(t, "flash_attn")
    common.set_precision(t, "bf16")
    t.put("training.lr_scheduler", "constant")
    t.put("training.weight_decay", 0.01)
    common.set_interval(t, "save", ("steps", 0))
    if t.get("dist_config.name") == "deepspeed":
        common.set_sharding(t, "dist_config.config_file", t.get("dist_config.config_file"))
    elif t.get("dist_config.name") and t.get_setting("training.optimizer") != "muon":
        common.convert_fsdp(t, "dist_config.name", t.foreign.tree["dist_config"])
    common.set_distribution(t)
    t.require("train_dataset", common.NO_DATA)
    sources = read_v1_sources(t)
    t.put_sources(sources, "train_dataset")
    if t.get("model_class") == "cls":
        common.set_preference(t, None, "cutoff_len", "model_class")
    elif any(source["format"] == "preference" for source in sources):
        set_losses(t, "train_dataset")
    else:
        t.drop("preference.", "reward.")
    return t


def set_losses(t: Translation, name: str) -> None:
    loss = common.PREFERENCE_LOSSES.get(str(t.get("pref_loss", "sigmoid")).lower(), "dpo")
    losses = {loss: 1.0, "sft": t.get("pref_ftx", 0.0), "bco_pair": t.get("pref_bco_weight", 0.0)}
    common.set_preference(t, losses, "cutoff_len", name, "pref_loss", "pref_ftx", "pref_bco_weight")
    if losses["bco_pair"]:
        t.note("pref_bco_weight", "the rewards of bco_pair are not shifted by their running mean")


def read_v1_sources(t: Translation) -> list[dict[str, Any]]:
    path = str(t.get("train_dataset", ""))
    entries = common.read_file(t, "train_dataset", path, V1_SOURCES) if path.endswith((".yaml", ".yml")) else None
    if entries is None:
        t.reject("train_dataset", "must be a YAML file of sources, in the folder of this file or a parent folder")
    sources = []
    for name, entry in (entries or {}).items():
        if entry.get("converter") not in V1_FORMATS:
            t.reject("train_dataset", f"{name}: set converter to one of {', '.join(V1_FORMATS)}")
        format_, path = V1_FORMATS.get(entry.get("converter"), "auto"), entry.get("path", "")
        source = {"path": str(t.foreign.find_file(path) or path), "format": format_, "max_samples": entry.get("size")}
        source |= {key: entry[key] for key in ("split", "weight") if key in entry}
        sources.append({key: value for key, value in source.items() if value not in (None, "train")})
    t.note("train_dataset", "a conversation is one example; instruction and input are joined by a blank line")
    return sources


def translate_adapter(t: Translation) -> None:
    common.set_quantization_bits(t, "quantization_bit")
    if "lora.alpha" not in t.settings:
        t.put("lora.alpha", 2 * max(1, t.get("lora_rank", 8)))
    common.set_experts(t)
    if t.get("pissa_init"):
        t.put("lora.init", "pissa" if t.get("pissa_iter") == -1 else "pissa_niter_16", "pissa_init", "pissa_iter")


def translate_data(t: Translation) -> None:
    t.require("dataset", common.NO_DATA)
    if names := split_names(t.get("dataset")):
        translate_sources(t, names)
    is_pretraining, is_packed = t.get("stage") == "pt", t.get("packing") or t.get("neat_packing")
    if is_packed or (is_pretraining and t.get("packing") is None):
        t.put("dataset.packing", True, "packing", "neat_packing")
        if not t.get("neat_packing"):
            t.note("packing" if is_packed else "stage", "documents in a pack do not attend to each other")
    template = t.get("template", "")
    if template in common.CHAT_TEMPLATES and not t.has_images:
        t.put("dataset.chat_template", common.CHAT_TEMPLATES[template], "template")
    elif template and not is_pretraining:
        reasoning_note = ", and reasoning in the records is trained on" * template.endswith("_nothink")
        t.note("template", f"{template}: {common.TOKENIZER_TEMPLATE_NOTE}{reasoning_note}")
    if t.get("enable_thinking") is False:
        t.put("dataset.thinking", "empty", "enable_thinking")
        t.note("enable_thinking", "if the chat template does not have enable_thinking, set dataset.thinking: strip")
    common.set_thinking(t)


def translate_sources(t: Translation, names: list[str]) -> None:
    folder = t.get("dataset_dir", "data")
    file = t.foreign.find_file(f"{folder}/dataset_info.json") or t.foreign.find_file("dataset_info.json")
    name = "dataset_dir" if t.get("dataset_dir") else "dataset"
    if folder.startswith(("REMOTE:", "ONLINE")):
        t.reject("dataset_dir", "a list of datasets on the Hub is not supported; download the list and set its folder")
    elif file is None:
        missing = f"no {folder}/dataset_info.json in the folder of this file or a parent folder"
        t.reject(name, f"{missing}; pass its folder with --dataset-dir")
    else:
        info = common.read_file(t, name, str(file), {"*": Any})
        sources = [read_source(t, info, source, file) for source in names] if info is not None else []
        t.put_sources(sources, "dataset", "max_samples")
        if (held_out := split_names(t.get("eval_dataset"))) and info is not None:
            if len(held_out) > 1:
                t.note_unsupported("eval_dataset", f"only the first of {len(held_out)} is used")
            t.put("dataset.evaluation", read_source(t, info, held_out[0], file, "eval_dataset"), "eval_dataset")


def read_source(t: Translation, info: dict[str, Any], name: str, file: Path, key: str = "dataset") -> dict[str, Any]:
    if name not in info:
        t.reject(key, f"{name} is missing or empty in {file}; add it there, or correct the name")
        return {}
    entry = common.convert_part(t, key, str(file), name, ENTRY_TYPE, info[name])
    if entry is None:
        return {}
    columns, tags, formatting = entry.get("columns", {}), entry.get("tags", {}), entry.get("formatting", "alpaca")
    stage = {"rm": "dpo"}.get(t.get("stage"), t.get("stage"))  # reward models are trained on pairs too
    kind = "kto" if "kto_tag" in columns else "dpo" if entry.get("ranking") else ""
    if (stage if stage in ("dpo", "kto") else "") != kind:
        needs = {"dpo": "has no pairs; use data with ranking: true", "kto": "has no labels; use data with kto_tag"}
        t.reject(key, f"{name}: {needs.get(stage, f'is preference data; use stage: {kind}')}")
    if {"videos", "audios"} & columns.keys():
        t.reject(key, f"{name}: {common.VISION}")
    if "images" in columns:
        common.check_images(t, "model_name_or_path")
        if re.search("qwen", str(t.get("model_name_or_path")), re.IGNORECASE):  # other models have a fixed size
            t.put("dataset.max_pixels", t.get("image_max_pixels", 768 * 768), "image_max_pixels")
            if smallest := t.get("image_min_pixels"):
                t.put("dataset.min_pixels", smallest, "image_min_pixels")
        if t.get("freeze_vision_tower") is False:
            t.put("vision.train", "lora", "freeze_vision_tower")
    source = read_location(t, entry, file.parent, name, key)
    if (limit := t.get("max_samples")) is not None and limit < 1:
        t.reject("max_samples", "must be 1 or more; remove it to use all records")
    if (source_limit := entry.get("num_samples")) is not None and source_limit < 1:
        t.reject(key, f"{name}: num_samples={source_limit} must be 1 or more; remove it to use all records")
    if samples := [count for count in (source_limit, limit) if count and count > 0]:
        source["max_samples"] = min(samples)
    if t.get("stage") == "pt":
        column = columns.get("prompt", "instruction" if formatting != "sharegpt" else "text")
        return source | {"format": "completion", "fields": {"text": column}}
    if entry.get("ranking"):
        names = {"instruction": "prompt", "input": "query"} if formatting == "alpaca" else {"conversations": "messages"}
        names |= {name: name for name in ("chosen", "rejected", "system", "tools", "images")}
        fields = {field: columns[name] for field, name in names.items() if columns.get(name, field) != field}
        return source | {"format": "preference", **({"fields": fields} if fields else {})}
    if formatting in ("alpaca", "sharegpt", "openai"):
        format_ = "messages" if formatting == "openai" else "sharegpt"
        read = read_alpaca(t, columns) if formatting == "alpaca" else read_turns(columns, tags, format_)
        if kind == "kto":
            names = {"from": "role", "value": "content"}
            fields = {names.get(field, field): column for field, column in read.get("fields", {}).items()}
            if "history" in fields:
                t.reject(key, f"{name}: history is not supported with kto_tag; write the records as messages")
            read |= {"format": "unpaired", "fields": fields | {"label": columns["kto_tag"]}}
        return source | read
    t.reject(key, f"{name}: formatting {formatting} is not supported; use alpaca, sharegpt or openai")
    return {}


def read_location(t: Translation, entry: dict[str, Any], folder: Path, name: str, key: str) -> dict[str, Any]:
    if not entry.keys() & {"hf_hub_url", "file_name"}:
        hubs = entry.keys() & {"ms_hub_url", "om_hub_url"}
        fix = "datasets on ModelScope and Modelers are not supported; download the data"
        if not hubs:
            fix = f"needs hf_hub_url or file_name{' (scripts are not supported)' * ('script_url' in entry)}; add one"
        t.reject(key, f"{name}: {fix}")
        return {}
    split, part = entry.get("split", "train"), entry.get("folder")
    settings = {
        "path": entry.get("hf_hub_url") or f"{folder}/{entry['file_name']}",
        "name": entry.get("subset"),
        "split": split if split != "train" else None,
        "data_files": part and [f"{part}/*"],
    }
    return {key: value for key, value in settings.items() if value is not None}


def read_alpaca(t: Translation, columns: dict[str, str]) -> dict[str, Any]:
    names = {"instruction": "prompt", "input": "query", "output": "response", "system": "system", "history": "history"}
    fields = {field: columns[name] for field, name in names.items() if columns.get(name, field) != field}
    if not columns or "query" in columns:
        t.note("dataset", "instruction and input are joined by a blank line instead of a newline")
    return {"format": "alpaca", **({"fields": fields} if fields else {})}


def read_turns(columns: dict[str, str], tags: dict[str, str], format_: str) -> dict[str, Any]:
    turns, role, content = TURNS[format_]
    if "system" in columns:  # only sharegpt supports it
        format_ = "sharegpt"
    used_names = (columns.get("messages", turns), tags.get("role_tag", role), tags.get("content_tag", content))
    names: dict[str, str] = dict(zip(TURNS[format_], used_names, strict=True))
    names |= {key: columns[key] for key in ("system", "tools", "images") if key in columns}
    roles = {role: [tags[tag]] for role, (tag, *known) in ROLES.items() if tags.get(tag, role).lower() not in known}
    fields = {key: name for key, name in names.items() if name != key}
    return {"format": format_, **({"fields": fields} if fields else {}), **({"roles": roles} if roles else {})}
