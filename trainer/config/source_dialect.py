"""Translate Axolotl's names for the settings of a data source."""

from collections.abc import Mapping
from typing import Any

from trainer.config.aliases import OTHER_TRAINERS
from trainer.config.errors import UserError, shown

RENAMED = {"type": "format", "data_path": "path"}
FIELDS: dict[str, str] = OTHER_TRAINERS["source_fields"]
FORMATS: dict[str, str] = OTHER_TRAINERS["source_formats"]
# These do not change training: how files are stored, read and split for tokenization.
NO_EFFECT = ("ds_type", "preprocess_shards", "trust_remote_code", "conversation", "train_on_eos", "train_on_eot")
INSIDE_TURNS = ("role", "content")


def source_settings(entry: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a source under our names, and a note for each translated name; unknown names are kept.

    Raises UserError for values that have no equivalent.
    """
    ours: dict[str, Any] = {}
    notes: list[str] = []
    fields: dict[str, str] = {}
    for name, value in entry.items():
        if name in FIELDS and (isinstance(value, str) or value is None):
            if value:
                fields[FIELDS[name]] = value
                notes.append(f"{name} of a source is read as fields.{FIELDS[name]}")
        elif name == "message_property_mappings" and isinstance(value, Mapping):
            inside = {ours_: theirs for ours_, theirs in value.items() if ours_ in INSIDE_TURNS and theirs != ours_}
            fields |= {key: str(theirs) for key, theirs in inside.items()}
            notes.append("message_property_mappings of a source is read as fields")
        elif name in NO_EFFECT and name not in ours:
            notes.append(f"{name} of a source has no effect here and is ignored")
        elif name == "format" and "type" in entry:
            raise UserError("format: also given as type, which is the same setting; keep one")
        elif name in RENAMED:
            ours[RENAMED[name]] = _translate_format(value) if name == "type" else value
            notes.append(f"{name} of a source is read as {RENAMED[name]}")
        elif name == "data_files" and isinstance(value, str):
            ours[name] = [value]
        else:
            ours[name] = value
    if fields:
        given = ours.get("fields")
        ours["fields"] = {**fields, **given} if isinstance(given, Mapping) else fields
    return ours, notes


def _translate_format(value: Any) -> Any:
    """Return our name of a format; raises UserError for a map, Axolotl's form of a custom prompt."""
    if isinstance(value, Mapping):
        raise UserError(f"type={shown(value)}: write a custom prompt as `format: custom` with `template` and `fields`")
    return FORMATS.get(value, value) if isinstance(value, str) else value
