"""LLaMA-Factory's second layout (`USE_V1`): `model`, `peft_config`, and `train_dataset` in a separate YAML."""

import os
from pathlib import Path
from typing import Any

from launcher.importing import common
from launcher.importing.translation import Foreign, Translation, load_table, read_kind, read_tables

KEYS = load_table("llamafactory_v1")
CONVERTERS = {"alpaca": "alpaca", "sharegpt": "messages"}
ENTRY = read_kind(read_tables()["types"]["llamafactory_v1_source"])
"""An entry of the YAML that `train_dataset` names."""


def translate(foreign: Foreign) -> Translation:
    """Return our settings for a configuration in the second layout."""
    t = Translation(foreign, KEYS)
    common.name_model(t, "model")
    common.set_bits(t, "quant_config.quantization_bit")
    common.set_experts(t)
    t.require("train_dataset", common.NO_DATA)
    sources = read_sources(t, "train_dataset")
    t.put_sources(sources, "train_dataset")
    if held_out := read_sources(t, "eval_dataset"):
        t.put("dataset.evaluation", held_out[0], "eval_dataset")
    if (strategy := t.get("batching_strategy", "normal")) != "normal":
        t.put("dataset.packing", True, "batching_strategy")
        t.note("batching_strategy", f"{strategy}: documents are packed to the length of a sequence")
    set_training(t)
    set_partition(t)
    return t


def read_sources(t: Translation, name: str) -> list[dict[str, Any]]:
    """Return the sources that a key names: a file of records, a data set of the hub, or a YAML that lists several."""
    value = t.get(name)
    if value is None:
        return []
    file = t.foreign.find(value)
    if not value.endswith((".yaml", ".yml")):
        return [{"path": str(file or value)}]
    if file is None:
        t.refuse(name, "no such file next to this file or above it; it lists the data sets")
        return []
    entries = common.read_file(t, name, value, {"*": ENTRY}) or {}
    return [read_source(t, file, entry, name) for entry in entries.values()]


def read_source(t: Translation, file: Path, entry: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the settings of one entry of such a YAML."""
    kind, path = entry.get("converter"), entry.get("path")
    if path is None or kind not in (None, *CONVERTERS):
        unknown = f"{file}: an entry has no path, or the unknown converter {kind}"
        t.refuse(name, common.REASONS["preferences"] if kind == "pair" else unknown)
        return {}
    if entry.get("source") == "local":
        path = next((at for folder in file.parents if os.path.exists(at := f"{folder}/{path}")), path)
    ours = {"split": entry.get("split"), "format": kind and CONVERTERS[kind], "max_samples": entry.get("size")}
    return {"path": path, **{key: value for key, value in ours.items() if value is not None}}


def set_training(t: Translation) -> None:
    """Set schedule, optimizer, precision, recomputation and saves."""
    t.put("training.lr_scheduler", "constant")
    common.set_warmup(t, default=0)
    if common.OPTIMIZERS.get(t.get("optim_config.name", "adamw").lower()) != "adamw":
        t.refuse("optim_config.name", common.REASONS["only_adamw"])
    common.set_precision(t, "bf16")
    epochs = t.get("save_epochs", 0)
    common.set_interval(t, "save", ("s_per_epoch", round(1 / epochs, 6)) if epochs > 0 else ("steps", 0), "save_epochs")


def set_partition(t: Translation) -> None:
    """Set how the GPUs share the model."""
    kind, path = t.get("dist_config.name", ""), t.get("dist_config.config_file")
    if kind == "deepspeed" and path is not None:
        common.set_partition(t, "dist_config.config_file", path)
    elif kind.startswith("fsdp"):
        common.set_fsdp(t, "dist_config.name", {})
