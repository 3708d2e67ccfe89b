"""Determine the format of a source and the meaning of its fields from the configuration or the first record."""

import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.config import SourceSection, UserError
from trainer.config.errors import find_nearest, to_text
from trainer.config.yaml_core import read_yaml

PREFERENCE, UNPAIRED = "preference", "unpaired"
_TABLES: dict[str, Any] = read_yaml(Path(__file__).with_name("formats.yaml")).tree
REQUIRED, OPTIONAL = (
    {format_: tuple(names.split()) for format_, names in _TABLES[kind].items()} for kind in ("required", "optional")
)
CHOSEN, REJECTED = _TABLES["chosen"].split(), _TABLES["rejected"].split()
# Names of fields that contain a list of turns.
TURN_LISTS = ("messages", "conversations", "conversation")
LABELS = {"true": True, "false": False, "1": True, "0": False}
ONE_RECORD_PER_LINE = "write one record per line"
SUPPORTED_FIELDS = "messages | conversations | instruction + output | prompt + completion | text"


@dataclass(frozen=True)
class RecordFormat:
    """A source's format; `names` maps the format's fields to the records' fields."""

    name: str
    names: Mapping[str, str]
    template: str | None = None
    template_without_input: str | None = None
    roles: Mapping[str, str] = field(default_factory=dict)
    """Maps the records' role names to chat template roles."""
    alpaca_as_chat: bool = False
    note: str = field(default="", compare=False)
    folder: Path | None = field(default=None, compare=False)
    """Base folder for relative image paths."""
    supports_images: bool = True
    """Whether the model supports image input."""


def detect_format(
    source: SourceSection,
    columns: Sequence[str],
    first_record: Mapping[str, Any],
    label: str,
    *,
    has_chat_template: bool,
) -> RecordFormat:
    """Determine a source's format from the configuration, the column names and the first record.

    Raises UserError if the fields match no format, or do not match the configured format.
    """
    format_ = "custom" if source.format == "auto" and source.template is not None else source.format
    lists = [name for name, value in first_record.items() if isinstance(value, list) and {*map(type, value)} == {str}]
    if lists and len(lists) == len(first_record) and not {*lists} & {*TURN_LISTS}:
        where = f"{label}.path={to_text(source.path)}, record 1"
        raise UserError(f"{where}: each field is a list ({join_names(columns)}); {ONE_RECORD_PER_LINE}")
    _check_fields(source, format_, columns, label)
    if format_ == "auto":
        fmt = _detect_from_fields(source, columns, first_record, label)
    else:
        fmt = _read_configured_format(source, format_, columns, label)
    path = Path(source.path or ".").expanduser()
    return replace(fmt, folder=path if path.is_dir() else path.parent, alpaca_as_chat=has_chat_template)


def _read_configured_format(source: SourceSection, format_: str, columns: Sequence[str], label: str) -> RecordFormat:
    names = {name: source.fields.get(name, name) for name in REQUIRED[format_] + OPTIONAL[format_]}
    for name in {"messages", "conversations"} & {*REQUIRED[format_]} - {*columns, *source.fields}:
        names[name] = next((other for other in TURN_LISTS if other in columns), name)
    missing = [names[name] for name in REQUIRED[format_] if names[name] not in columns]
    is_paired = format_ == UNPAIRED and all(names[name] in columns for name in REQUIRED[PREFERENCE])
    if missing and not is_paired:
        raise UserError(
            f"{label}.format={format_}: the records have {join_names(columns)}, but no {' or '.join(missing)}; "
            f"set {label}.format: auto, or map the fields in {label}.fields"
        )
    if format_ == "custom":
        names |= _find_template_names(source, columns, label)
    return RecordFormat(
        format_,
        names,
        template=source.template,
        template_without_input=source.template_without_input,
        roles=_map_roles(source),
        note=f"{label}: format {format_}",
    )


def _detect_from_fields(
    source: SourceSection, columns: Sequence[str], first_record: Mapping[str, Any], label: str
) -> RecordFormat:
    renamed = {name: column for name, column in source.fields.items() if column in columns}
    present = {column: column for column in columns if column not in renamed.values()} | renamed

    def build_format(format_: str, names: Mapping[str, str]) -> RecordFormat:
        optional = {name: present.get(name, name) for name in OPTIONAL[format_]} | dict(source.fields)
        fields = " + ".join(names[name] for name in REQUIRED[format_])
        note = f"{label}: format {format_} (detected from the field{'s' if '+' in fields else ''} {fields})"
        return RecordFormat(format_, {**optional, **names}, roles=_map_roles(source), note=note)

    configured = bool({"chosen", "rejected"} & set(source.fields))
    if configured or not source.fields:
        if names := _find_preference_names(present, first_record, label, configured=configured):
            return build_format(PREFERENCE, names)
    # Labels 1 and 0 may also be classes.
    answer_label = str(first_record.get(present.get("label", ""))).strip().lower()
    if answer_label in LABELS and not answer_label.isdigit() and present.keys() & {
        "completion", "messages", "conversations", "output",
    }:  # fmt: skip
        return build_format(UNPAIRED, {"label": present["label"]})
    for name in TURN_LISTS:
        turns = first_record.get(present[name]) if name in present else None
        if isinstance(turns, list) and turns and isinstance(turns[0], dict):
            if source.fields.get("role", "role") in turns[0]:
                return build_format("messages", {"messages": present[name]})
            if source.fields.get("from", "from") in turns[0]:
                return build_format("sharegpt", {"conversations": present[name]})
    for format_ in ("messages", "sharegpt", "alpaca", "prompt_completion", "completion"):
        if all(name in present for name in REQUIRED[format_]):
            return build_format(format_, {name: present[name] for name in REQUIRED[format_]})
    for pair in (("role", "content"), ("from", "value")):
        if not source.fields and set(pair) <= present.keys():
            problem = f"each record is a single turn ({' and '.join(pair)})"
            raise UserError(f"{label}.format=auto: {problem}; write conversations as lists of turns in `messages`")
    for format_, names in _TABLES["common_names"]:
        if all(column in present for column in names.values()):
            return build_format(format_, {name: present[column] for name, column in names.items()})
    lists = [
        name for name, value in first_record.items() if isinstance(value, list) and value and isinstance(value[0], dict)
    ]
    if lists and not source.fields and not {*TURN_LISTS} & {*columns}:
        problem = f"is a mapping of lists ({join_names(lists)}), not a list of records"
        fix = f"{ONE_RECORD_PER_LINE}, or name the list of turns in {label}.fields, e.g. {{messages: {lists[0]}}}"
        raise UserError(f"{label}.path={to_text(source.path)}: {problem}; {fix}")
    raise UserError(f"{label}.format=auto: {_describe_missing_fields(source, columns, label)}")


def _map_roles(source: SourceSection) -> dict[str, str]:
    return {name.strip().lower(): role for role, names in source.roles.items() for name in names}


def _find_preference_names(
    present: Mapping[str, str], first_record: Mapping[str, Any], label: str, *, configured: bool
) -> dict[str, str] | None:
    """Return the names of a preference record's fields; None if the record is not a preference record.

    It is not one if it has no rejected answer, or if its messages already end with an answer. The messages are
    not checked if `configured` is set, which means that dataset.fields names the chosen or the rejected answer.
    Raises UserError if the record has a rejected answer but no chosen one.
    """
    rejected = next((name for name in REJECTED if name in present), None)
    chosen = next((name for name in CHOSEN if name in present), None)
    names = {name: present[name] for name in OPTIONAL[PREFERENCE] if name in present}
    for name in () if configured else ("messages", "conversations"):
        turns = first_record.get(names.get(name, ""))
        last = turns[-1] if isinstance(turns, list) and turns and isinstance(turns[-1], dict) else {}
        if any(last.get(key) in ("assistant", "gpt") for key in ("role", "from")):
            return None
    if rejected is None:
        return None
    if chosen is None:
        raise UserError(
            f"{label}.format=auto: the records have a rejected answer but no chosen one ({join_names(present)}); "
            f"name both in {label}.fields: {{chosen: best, rejected: {to_text(present[rejected], 30)}}}"
        )
    if "prompt" not in names and "question" in present:
        names["prompt"] = present["question"]
    return names | {"chosen": present[chosen], "rejected": present[rejected]}


def _describe_missing_fields(source: SourceSection, columns: Sequence[str], label: str) -> str:
    if "input_ids" in columns:
        return "the records are already tokenized (input_ids), but only text is supported; use the original text"
    is_csv = any(suffix in (source.path or "").lower() for suffix in (".csv", ".tsv"))
    unnamed = [name for name in columns if re.fullmatch(r"column \d+", name)]
    gap = f", which does not name {join_names(unnamed)}" if unnamed else ""
    header = f" (from the first line of the CSV file{gap})" * is_csv
    example = "{prompt: question, completion: answer}, {text: body}, or {chosen: better, rejected: worse}"
    return f"the records have {join_names(columns)}{header}, not {SUPPORTED_FIELDS}; set {label}.fields, e.g. {example}"


def _check_fields(source: SourceSection, format_: str, columns: Sequence[str], label: str) -> None:
    candidates = [format_] if format_ in REQUIRED else REQUIRED
    known = {name for candidate in candidates for name in REQUIRED[candidate] + OPTIONAL[candidate]}
    inside_turns = {"role", "content", "from", "value"}
    for name, column in source.fields.items():
        if name not in known and format_ != "custom":
            close = find_nearest(name, known)
            hint = f"did you mean {close}?" if close else f"use {', '.join(sorted(known))}"
            hint = f"write {column}: {name}" if name in columns and column in known else hint
            raise UserError(f"{label}.fields.{name}={to_text(column)}: not a field of format {format_}; {hint}")
        if column not in columns and name not in inside_turns:
            raise UserError(f"{label}.fields.{name}={column}: no such field; the records have {join_names(columns)}")
        if others := [other for other in source.fields if source.fields[other] == column and other != name]:
            raise UserError(f"{label}.fields.{name}={column}: is also used for {join_names(others)}; use another field")


def _find_template_names(source: SourceSection, columns: Sequence[str], label: str) -> dict[str, str]:
    assert source.template is not None
    setting = f"{label}.template={to_text(source.template)}"
    try:
        texts = [source.template, source.template_without_input or ""]
        parts = [(name, style or kind) for text in texts for _, name, style, kind in string.Formatter().parse(text)]
    except ValueError as error:
        raise UserError(f"{setting}: {error}; write literal braces twice, as {{{{ or }}}}") from None
    placeholders = [name for name, _ in parts if name is not None]
    if not placeholders or any(style for _, style in parts):
        raise UserError(f"{setting}: must contain fields, such as {{question}}, without formats; double other braces")
    names = {name: source.fields.get(name, name) for name in placeholders}
    if source.template_without_input:
        names.setdefault("input", source.fields.get("input", "input"))
    for name, column in names.items():
        # Records without an input need no field for it.
        if column not in columns and not (name == "input" and source.template_without_input):
            raise UserError(f"{setting}: the records have no field {{{name}}}; use {join_names(columns)}")
    return names


def describe_type(value: Any) -> str:
    names = {dict: "a record", list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def join_names(names: Iterable[str]) -> str:
    shown_names = [to_text(name, 60) if name == name.strip() else repr(name) for name in names]
    more = f" and {len(shown_names) - 12} more" if len(shown_names) > 12 else ""
    return (", ".join(shown_names[:12]) or "no fields") + more
