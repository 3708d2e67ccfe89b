"""The core of `zerolora import`: apply a table of another trainer's keys, then rules that combine several keys.

Every value is first converted to the type that the other trainer expects. Every key in a file results in a setting, a
remark, an entry in the list of keys without effect, or an error.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial, reduce
from itertools import accumulate
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from trainer.config.aliases import ALIASES, read_table
from trainer.config.errors import Mistake, UserErrors, describe_problem, find_nearest, to_text
from trainer.config.files import build_type_adapter
from trainer.config.messages import get_setting_type
from trainer.config.values import list_accepted_types, parse_value
from trainer.config.yaml_core import parse_scalar

EMPTY: tuple[Any, ...] = (None, "", [], {})
UNSET: Any = object()
MAP_PROBLEM = "must be a mapping, such as {a: b}"
OFF_VALUES = ("false", "no", "off", "none", "null")

# Types of values, bounded so that arithmetic neither overflows nor produces NaN.
Text = Annotated[str, BeforeValidator(partial(parse_value, str))]
WholeNumber = Annotated[int, BeforeValidator(partial(parse_value, int)), Ge(-(10**12)), Le(10**12)]
ZeroStage = Annotated[int, BeforeValidator(partial(parse_value, int)), Ge(0), Le(3)]
LONGEST_TIMEOUT_MINUTES = 1e6
_Float = Annotated[float, BeforeValidator(partial(parse_value, float)), Field(allow_inf_nan=False), Ge(-1e12), Le(1e12)]
Number = _Float | WholeNumber
"""A number; whole numbers stay integers."""
Steps = Annotated[WholeNumber | _Float, "steps"]
Minutes = Annotated[Number, Gt(0), AfterValidator(lambda seconds: min(seconds / 60, LONGEST_TIMEOUT_MINUTES))]
"""Seconds, converted to minutes."""
Names = (Text, [Text])
"""One name, several names separated by commas, or a list of names."""
# YAML reads `no` as false.
Strategy = Annotated[
    Literal["no", "steps", "epoch", "best"], BeforeValidator(lambda value: "no" if value is False else value)
]
KINDS = {
    "flag": bool, "whole": WholeNumber, "number": Number, "steps": Steps, "text": Text, "names": Names,
    "flag-or-text": bool | Text, "strategy": Strategy, "minutes": Minutes, "zero-stage": ZeroStage,
}  # fmt: skip


@dataclass(frozen=True)
class KeyMapping:
    """Describes how one key of another trainer is translated."""

    kind: Any = Any
    """Type of the key's value, as `convert` expects it."""
    to: str = ""
    """Our setting that receives the value; empty if a rule in Python reads the key."""
    default: Any = UNSET
    """The other trainer's default, if ours differs or may change."""
    unless: tuple[Any, ...] = ()
    """Values that mean the same as omitting the key."""
    values: Mapping[str, Any] | None = None
    """Lower-case value -> our value. Other values, except `false`, are rejected with the reason `otherwise`."""
    otherwise: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Lower-case value -> note on how zerolora differs."""
    refused: str = ""
    """Why a file that sets the key cannot be imported."""
    left_out: str = ""
    """Why the key is left out, and what to do instead."""


Table = Mapping[str, KeyMapping]


@cache
def read_tables() -> dict[str, Any]:
    return dict(read_table(Path(__file__).with_name("tables.yaml")))


def load_table(name: str) -> dict[str, KeyMapping]:
    source = read_tables()[name]
    table: dict[str, KeyMapping] = {}
    for names, row in source.get("rows", {}).items():
        table |= dict.fromkeys(names.split(), _parse_key(row))
    for names, why in source.get("refused", {}).items():
        table |= dict.fromkeys(names.split(), KeyMapping(refused=why))
    for word, keys in source.items():
        for entry in keys.split() if word in ("copy", "none", *KINDS) else ():
            key, _, no_value = entry.partition("!")
            key, _, default = key.partition(":")
            key, _, setting = key.partition("=")
            setting = (setting or ALIASES.get(key, key)) if word == "copy" else ""
            kind = _find_setting_kind(setting) if setting else KINDS.get(word, Any)
            unless = (parse_scalar(no_value),) if no_value else ()
            table.setdefault(key, KeyMapping(kind, setting, parse_scalar(default) if default else UNSET, unless))
    for names, why in source.get("left_out", {}).items():
        table |= {key: replace(table.get(key, KeyMapping()), left_out=why) for key in names.split()}
    return (load_table(source["includes"]) if "includes" in source else {}) | table


def _parse_key(row: Mapping[str, Any]) -> KeyMapping:
    kind, values, unless = parse_kind(row.get("kind")), row.get("values"), tuple(row.get("unless", ()))
    values = {value: value for value in values} if isinstance(values, list) else values and _split_keys(values)
    return KeyMapping(
        **{**row, "kind": kind, "values": values, "unless": unless, "notes": _split_keys(row.get("notes", {}))}
    )


def _split_keys(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {word: value for words, value in row.items() for word in str(words).lower().split()}


def parse_kind(kind: Any) -> Any:
    if isinstance(kind, list):
        return tuple(map(parse_kind, kind))
    if isinstance(kind, dict):
        return [parse_kind(kind["each"])] if "each" in kind else {key: parse_kind(inner) for key, inner in kind.items()}
    words = kind.split(" | ") if kind else ["any"]
    constants = tuple(parse_scalar(word) for word in words if word not in KINDS and word != "any")
    types = [KINDS.get(word, Any) for word in words if word in KINDS or word == "any"]
    return reduce(or_, [*types, *([Literal[constants]] if constants else [])])


def _find_setting_kind(setting: str) -> Any:
    accepted = list_accepted_types(get_setting_type(setting))
    kinds = ((bool, bool), (float, Number), (int, WholeNumber), (tuple, Names), (str, Text))
    return next((kind for known, kind in kinds if known in accepted), Any)


@dataclass
class ForeignConfig:
    """Another trainer's configuration."""

    trainer: str
    label: str
    """Name in messages: the path, or the script on a command line."""
    tree: dict[str, Any]
    folder: Path
    """Base folder for relative paths."""
    path: Path | None = None
    """The file to which `lines` refer."""
    lines: Mapping[str, int] = field(default_factory=dict)
    is_command_line: bool = False

    def find_line(self, name: str) -> int:
        """Return the line number of a dotted name or of its nearest known parent; 0 if none is known."""
        while name and name not in self.lines:
            name = name.rpartition(".")[0]
        return self.lines.get(name, 0)

    def locate(self, name: str) -> str:
        """Return the location of a key for messages, such as `x.yml:7: name`."""
        if line := self.find_line(name):
            return f"{self.path}:{line}: {name}"
        return f"--{name}" if self.is_command_line else f"{self.label}: {name}"

    def find_file(self, name: str) -> Path | None:
        """Return the file `name` from the configuration's folder or the nearest parent folder that contains it."""
        paths = (os.path.join(folder, name) for folder in (self.folder, *self.folder.parents))
        return next((Path(path) for path in paths if os.path.isfile(path)), None)


class Setting(NamedTuple):
    """A zerolora setting: its value, and the foreign keys that set it (none for the other trainer's default)."""

    value: Any
    names: tuple[str, ...]


class Translation:
    """Collects our settings by dotted name, with remarks and errors about the keys that set them."""

    def __init__(self, foreign: ForeignConfig, table: Table) -> None:
        self.foreign = foreign
        self._table = table
        self.settings: dict[str, Setting] = {}
        self.different: list[tuple[str, str]] = []
        self.left_out: list[tuple[str, str]] = []
        self.no_effect: list[str] = []
        self.has_images = False  # text-only chat templates do not apply
        self._values: dict[str, Any] = {}
        self._mistakes: dict[str, str] = {}
        for name, key in table.items():
            value = self._get_raw(name)
            if value not in EMPTY and not (key.refused and is_off(value)):
                self._translate(name, key, value)
        for key in table.values():
            if key.default is not UNSET:
                self.settings.setdefault(key.to, Setting(key.default, ()))

    def get(self, name: str, default: Any = None) -> Any:
        """Return the converted value of a key; `default` if it is missing, empty or invalid."""
        return self._values.get(name, default)

    def get_first(self, *names: str) -> Any:
        return next((self._values[name] for name in names if name in self._values), None)

    def get_setting(self, setting: str) -> Any:
        return self.settings[setting].value if setting in self.settings else None

    def put(self, setting: str, value: Any, *names: str) -> None:
        self.settings[setting] = Setting(value, tuple(name for name in names if self._get_raw(name) not in EMPTY))

    def put_sources(self, sources: Sequence[Mapping[str, Any]], *names: str) -> None:
        if len(sources) > 1:
            self.put("dataset.mix", list(sources), *names)
        for key, value in sources[0].items() if len(sources) == 1 else ():
            self.put(f"dataset.{key}", value, *names)

    def drop(self, *prefixes: str) -> None:
        """Remove settings with these prefixes, which have no effect. Negative numbers are still reported as errors."""
        for dotted in [dotted for dotted in self.settings if dotted.startswith(prefixes)]:
            value, names = self.settings.pop(dotted)
            if names and isinstance(value, int | float) and value < 0:
                self.reject(names[0], "must not be negative")

    def note(self, name: str, text: str) -> None:
        self.different.append((name, text))

    def note_unsupported(self, name: str, text: str) -> None:
        self.left_out.append((name, text))

    def report(self, name: str, value: Any, problem: str) -> None:
        """Report an error, unless the key already has one."""
        is_bare = self.foreign.is_command_line and value is True  # an option without a value
        value_text = "" if value is UNSET or is_bare else f"={to_text(value, 40)}"
        if is_bare and problem.startswith("must be a string"):
            problem = "missing value; add it after the option"
        self._mistakes.setdefault(name, f"{self.foreign.locate(name)}{value_text}: {problem}")

    def reject(self, name: str, problem: str) -> None:
        value = self._get_raw(name)
        self.report(name, UNSET if value in EMPTY else value, problem)

    def require(self, name: str, fix: str) -> None:
        if self._get_raw(name) in EMPTY:
            self.reject(name, f"missing; {fix}")

    def _get_raw(self, name: str) -> Any:
        """Return the unconverted value of a dotted name. Report an error if its parent is not a mapping."""
        value: Any = self.foreign.tree
        for part in name.split("."):
            if isinstance(value, list) and part.isdigit():
                value = value[int(part)]
            elif isinstance(value, dict):
                value = value.get(part)
            elif value not in EMPTY:
                self.report(name.partition(".")[0], value, MAP_PROBLEM)
                return None
        return value

    def _translate(self, name: str, key: KeyMapping, value: Any) -> None:
        before = len(self._mistakes)
        if self.foreign.is_command_line and isinstance(key.kind, list) and not isinstance(value, list):
            value = [value]
        value = convert(key.kind, value, name, self.report)
        if len(self._mistakes) > before:
            return
        self._values[name] = value
        word = str(value).lower()
        if key.refused:
            self.reject(name, key.refused)
        elif key.left_out and not is_off(value) and value not in key.unless:
            self.note_unsupported(name, f"{to_text(value, 60)}: {key.left_out}")
        elif key.values is not None and word not in key.values:
            if not is_off(value):
                self.reject(name, key.otherwise)
        elif key.to and key.to not in self.settings and value not in key.unless:
            self.put(key.to, value if key.values is None else key.values[word], name)
            if word in key.notes:
                self.note(name, key.notes[word])

    def finish(self) -> None:
        """Drop settings without effect, and record the keys that no table row or rule has used."""
        table = self._table
        if self.get_setting("adapter") == "none":
            self.drop("lora.")
        if self.get_setting("adapter") != "qlora":
            self.drop("quantization.")
        if self.get_setting("quantization.quant_type") == "int8":
            self.drop("quantization.double_quant")
        prefixes = tuple(name[:-1] for name in table if name.endswith("*"))
        sections = {name.partition(".")[0] for name in table if "." in name}
        used = {name for setting in self.settings.values() for name in setting.names} | self._mistakes.keys()
        used |= {name for name, _ in (*self.different, *self.left_out)}
        used |= {first for name in used if (first := name.partition(".")[0]) not in sections}
        for name, value in self.foreign.tree.items():
            is_section = name in sections - used and isinstance(value, dict) and value
            keys = {f"{name}.{key}": inner for key, inner in value.items()} if is_section else {name: value}
            for key, inner in keys.items():
                if key not in used and (is_off(inner) or key in table or key.startswith(prefixes)):
                    self.no_effect.append(key)
                elif key not in used:
                    near = find_nearest(key, [name for name in table if name[-1] != "*"], 0.85)
                    why = f"did you mean {near}?" if near else "no equivalent in zerolora"
                    self.note_unsupported(key, f"{to_text(inner, 60)}: {why}")

    def report_config_error(self, mistake: Mistake | str) -> None:
        assert isinstance(mistake, Mistake), mistake
        parents = accumulate(mistake.setting.split("."), lambda section, name: f"{section}.{name}")
        setting = next((name for name in parents if name in self.settings), "")
        names = self.settings[setting].names if setting else ()
        if names and names[0] not in self._mistakes:
            name = names[0] + mistake.setting.removeprefix(setting)
            if isinstance(self._get_raw(name), (list, dict)) and not isinstance(mistake.value, (list, tuple, dict)):
                mistake = replace(mistake, value=None)
            self._mistakes.setdefault(name, str(replace(mistake, name=self.foreign.locate(name))))
        elif not names and not self._mistakes:  # otherwise another error may be the cause
            self._mistakes[mistake.setting] = f"{self.foreign.label}: {mistake}"

    def check(self) -> None:
        """Raise UserErrors with all reported errors, in file order, if there are any."""
        if self._mistakes:
            raise UserErrors([self._mistakes[name] for name in sorted(self._mistakes, key=self.foreign.find_line)])


def is_off(value: Any) -> bool:
    """Return whether a value is empty, false, or a string such as `none`."""
    return value in EMPTY or str(value).strip().lower() in OFF_VALUES


def split_names(value: Any) -> list[str]:
    parts = value if isinstance(value, list) else str(value or "").split(",")
    return [part.strip() for part in parts if part.strip()]


def convert(kind: Any, value: Any, name: str, report: Callable[[str, Any, str], None]) -> Any:
    """Convert a value to `kind`; call `report` with the dotted name of each part that does not match.

    A kind is a type; `[kind]` for a list; `{key: kind}` for a mapping, where `*` matches any other key and empty values
    are dropped; or a tuple of kinds, chosen by whether the value is a mapping, a list or a scalar.
    """
    forms = ""
    if isinstance(kind, tuple):
        forms = " or a mapping" * any(isinstance(one, dict) for one in kind)
        form = next((form for form in (dict, list) if isinstance(value, form)), None)
        fitting = (item for item in kind if (isinstance(item, form) if form else not isinstance(item, (dict, list))))
        kind = kind[0] if form is None and not isinstance(value, str) else next(fitting, kind[0])
    if isinstance(kind, dict) and isinstance(value, dict):
        items = {str(key): inner for key, inner in value.items() if inner not in EMPTY}
        return {
            key: convert(kind.get(key, kind.get("*", Any)), inner, f"{name}.{key}", report)
            for key, inner in items.items()
        }
    if isinstance(kind, list) and isinstance(value, list):
        return [convert(kind[0], inner, f"{name}.{index}", report) for index, inner in enumerate(value)]
    if isinstance(kind, (dict, list)):
        report(name, value, MAP_PROBLEM if isinstance(kind, dict) else "must be a list, such as [a, b]")
        return None
    try:
        return build_type_adapter(kind).validate_python(value)
    except ValidationError as error:
        first, *others = map(describe_problem, error.errors(include_url=False))
        words = [other.removeprefix("must be ") for other in others if other.startswith("must be '")]
        first = f"must be a string{forms}" if forms and first.startswith("must be a string") else first
        report(name, value, ", or ".join([first, *words]))
        return None
