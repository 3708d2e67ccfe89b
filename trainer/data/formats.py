"""The format of a source and the meaning of its fields, from the configuration or the first record."""

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.config import SourceSection, UserError
from trainer.config.errors import nearest, shown
from trainer.config.yaml_core import read_yaml

PREFERENCE, UNPAIRED = "preference", "unpaired"
_TABLES: dict[str, Any] = read_yaml(Path(__file__).with_name("formats.yaml")).tree
REQUIRED, OPTIONAL = (
    {format_: tuple(names.split()) for format_, names in _TABLES[kind].items()} for kind in ("required", "optional")
)
CHOSEN, REJECTED = _TABLES["chosen"].split(), _TABLES["rejected"].split()
# Names of a list of turns.
TURN_LISTS = ("messages", "conversations", "conversation")
ONE_EACH = "write each record on a line of its own"
WANTED = "messages | conversations | instruction + output | prompt + completion | text"


@dataclass(frozen=True)
class Shape:
    """A source's format, the records' names of its fields, and how both were found."""

    format: str
    names: Mapping[str, str]
    template: str | None = None
    template_without_input: str | None = None
    roles: Mapping[str, str] = field(default_factory=dict)
    """Roles of the records -> our roles."""
    alpaca_as_chat: bool = False
    note: str = field(default="", compare=False)
    folder: Path | None = field(default=None, compare=False)
    """Where relative paths of images are looked for."""


def find_shape(
    source: SourceSection, columns: Sequence[str], first: Mapping[str, Any], label: str, *, has_chat_template: bool
) -> Shape:
    """Return the format of a source's records from the configuration, the column names and the first record.

    Raises UserError with the fields found and the fields expected.
    """
    format_ = "custom" if source.format == "auto" and source.template else source.format
    if first and all(isinstance(value, list) and value and isinstance(value[0], str) for value in first.values()):
        where = f"{label}.path={shown(source.path)}, record 1"
        raise UserError(f"{where}: has columns as lists ({listed(columns)}), not one value each; {ONE_EACH}")
    _check_fields(source, format_, columns, label)
    if format_ == "auto":
        shape = _detect(source, columns, first, label)
    else:
        shape = _read_settings(source, format_, columns, label)
    path = Path(source.path or ".").expanduser()
    return replace(shape, folder=path if path.is_dir() else path.parent, alpaca_as_chat=has_chat_template)


def _read_settings(source: SourceSection, format_: str, columns: Sequence[str], label: str) -> Shape:
    names = {name: source.fields.get(name, name) for name in REQUIRED[format_] + OPTIONAL[format_]}
    for name in {"messages", "conversations"} & {*REQUIRED[format_]} - {*columns, *source.fields}:
        names[name] = next((other for other in TURN_LISTS if other in columns), name)
    missing = [names[name] for name in REQUIRED[format_] if names[name] not in columns]
    is_paired = format_ == UNPAIRED and all(names[name] in columns for name in REQUIRED[PREFERENCE])
    if missing and not is_paired:
        raise UserError(
            f"{label}.format={format_}: no field {' or '.join(missing)} in the records, which have {listed(columns)}; "
            f"set {label}.format: auto, or name them in {label}.fields"
        )
    if format_ == "custom":
        names |= _template_names(source, columns, label)
    return Shape(
        format_,
        names,
        template=source.template,
        template_without_input=source.template_without_input,
        roles=_map_roles(source),
        note=f"{label}: format {format_}",
    )


def _detect(source: SourceSection, columns: Sequence[str], first: Mapping[str, Any], label: str) -> Shape:
    renamed = {name: column for name, column in source.fields.items() if column in columns}
    present = {column: column for column in columns if column not in renamed.values()} | renamed

    def shape(format_: str, names: Mapping[str, str]) -> Shape:
        optional = {name: present.get(name, name) for name in OPTIONAL[format_]} | dict(source.fields)
        fields = " + ".join(names[name] for name in REQUIRED[format_])
        note = f"{label}: format {format_} (found by the field{'s' if '+' in fields else ''} {fields})"
        return Shape(format_, {**optional, **names}, roles=_map_roles(source), note=note)

    given = bool({"chosen", "rejected"} & set(source.fields))
    if (given or not source.fields) and (names := _preference_names(present, first, label, given=given)):
        return shape(PREFERENCE, names)
    if isinstance(first.get(present.get("label", "")), bool) and present.keys() & {
        "completion", "messages", "conversations", "output",
    }:  # fmt: skip
        return shape(UNPAIRED, {"label": present["label"]})
    for name in TURN_LISTS:
        turns = first.get(present[name]) if name in present else None
        if isinstance(turns, list) and turns and isinstance(turns[0], dict):
            if source.fields.get("role", "role") in turns[0]:
                return shape("messages", {"messages": present[name]})
            if source.fields.get("from", "from") in turns[0]:
                return shape("sharegpt", {"conversations": present[name]})
    for format_ in ("messages", "sharegpt", "alpaca", "prompt_completion", "completion"):
        if all(name in present for name in REQUIRED[format_]):
            return shape(format_, {name: present[name] for name in REQUIRED[format_]})
    for pair in (("role", "content"), ("from", "value")):
        if not source.fields and set(pair) <= present.keys():
            raise UserError(
                f"{label}.format=auto: each record is a single turn ({' and '.join(pair)}) instead of a whole "
                "conversation; write the turns as a list under `messages`"
            )
    for format_, names in _TABLES["common_names"]:
        if all(column in present for column in names.values()):
            return shape(format_, {name: present[column] for name, column in names.items()})
    lists = [name for name, value in first.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if lists and not source.fields and not {*TURN_LISTS} & {*columns}:
        problem = f"is a map of lists ({listed(lists)}), not a list of records"
        fix = f"{ONE_EACH}, or name the list of turns in {label}.fields, as {{messages: {lists[0]}}}"
        raise UserError(f"{label}.path={shown(source.path)}: {problem}; {fix}")
    raise UserError(f"{label}.format=auto: {_describe_missing_fields(source, columns, label)}")


def _map_roles(source: SourceSection) -> dict[str, str]:
    return {name.strip().lower(): role for role, names in source.roles.items() for name in names}


def _preference_names(
    present: Mapping[str, str], first: Mapping[str, Any], label: str, *, given: bool
) -> dict[str, str] | None:
    """Return the fields of pairs of a better and a worse answer; None if there are none, or a whole conversation too.

    `given` is whether the configuration names one of them.
    """
    rejected = "rejected" if "rejected" in present else next((name for name in REJECTED if name in present), None)
    chosen = next((name for name in CHOSEN if name in present), None)
    names = {name: present[name] for name in OPTIONAL[PREFERENCE] if name in present}
    for name in () if given else ("messages", "conversations"):
        turns = first.get(names.get(name, ""))
        last = turns[-1] if isinstance(turns, list) and turns and isinstance(turns[-1], dict) else {}
        if {last.get("role"), last.get("from")} & {"assistant", "gpt"}:
            return None
    if rejected is None:
        return None
    if chosen is None:
        raise UserError(
            f"{label}.format=auto: the records have {listed(present)}: an answer that was rejected without one that "
            f"was chosen; name both in {label}.fields, as {{chosen: best, rejected: {shown(present[rejected], 30)}}}"
        )
    if "prompt" not in names and "question" in present:
        names["prompt"] = present["question"]
    return names | {"chosen": present[chosen], "rejected": present[rejected]}


def _describe_missing_fields(source: SourceSection, columns: Sequence[str], label: str) -> str:
    if "input_ids" in columns:
        return (
            "the records are tokenised already (input_ids), and only text is read, so that its tokens and labels fit "
            "the model; use the text that they were made from"
        )
    is_csv = any(suffix in (source.path or "").lower() for suffix in (".csv", ".tsv"))
    head = ", as the first line of a CSV file names them" * is_csv
    example = "such as {prompt: question, completion: answer}, {text: body}, or {chosen: better, rejected: worse}"
    return f"the records have {listed(columns)}{head}, and wanted is one of {WANTED}; set {label}.fields, {example}"


def _check_fields(source: SourceSection, format_: str, columns: Sequence[str], label: str) -> None:
    known = {name for format_name in REQUIRED for name in REQUIRED[format_name] + OPTIONAL[format_name]}
    if format_ in REQUIRED and format_ != "custom":
        known = {*REQUIRED[format_], *OPTIONAL[format_]}
    inside_turns = {"role", "content", "from", "value"}
    for name, column in source.fields.items():
        if name not in known and format_ != "custom":
            close = nearest(name, known)
            hint = f"did you mean {close}?" if close else f"known are {', '.join(sorted(known))}"
            raise UserError(f"{label}.fields.{name}: not a field of format {format_}; {hint}")
        if column not in columns and name not in inside_turns:
            raise UserError(f"{label}.fields.{name}={column}: no such field; the records have {listed(columns)}")
        if others := [other for other in source.fields if source.fields[other] == column and other != name]:
            raise UserError(f"{label}.fields.{name}={column}: also the field of {listed(others)}; name another one")


def _template_names(source: SourceSection, columns: Sequence[str], label: str) -> dict[str, str]:
    assert source.template is not None
    try:
        texts = [source.template, source.template_without_input or ""]
        marks = [name for text in texts for _, name, _, _ in string.Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise UserError(f"{label}.template: {error}; write a brace of the text itself twice, as {{{{ or }}}}") from None
    names = {mark: source.fields.get(mark, mark) for mark in marks}
    if source.template_without_input:
        names.setdefault("input", source.fields.get("input", "input"))
    for mark, column in names.items():
        # Records without inputs need no such field.
        if column not in columns and not (mark == "input" and source.template_without_input):
            raise UserError(f"{label}.template: {{{mark}}} is not a field of the records, which have {listed(columns)}")
    return names


def describe_type(value: Any) -> str:
    """Describe the type of a JSON value for a message."""
    names = {dict: "a record", list: "a list", str: "text", int: "a number", float: "a number", bool: "true or false"}
    return "nothing" if value is None else names.get(type(value), type(value).__name__)


def listed(names: Iterable[str]) -> str:
    """Return field names for a message, at most twelve."""
    shown_names = [shown(name, 60) for name in names]
    more = f" and {len(shown_names) - 12} more" if len(shown_names) > 12 else ""
    return (", ".join(shown_names[:12]) or "no fields") + more
