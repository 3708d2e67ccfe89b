"""From a YAML file and key=value overrides to a RunConfig, or to one line that says what is wrong."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from trainer.config.aliases import SOURCE_ALIASES, canonical
from trainer.config.checks import check_combinations
from trainer.config.errors import UserError, shown
from trainer.config.messages import first_mistake
from trainer.config.sections import RunConfig

_BOOLEAN = "tag:yaml.org,2002:bool"
SOURCES = ("dataset.mix", "dataset.evaluation")


@dataclass(frozen=True)
class LoadedConfig:
    """A valid configuration, and what was understood differently from how it was written."""

    config: RunConfig
    notes: tuple[str, ...]


class _StrictLoader(yaml.SafeLoader):
    """YAML that refuses a key written twice, of which plain YAML keeps the last without a word.

    Only true and false are truth values, as in YAML 1.2: PyYAML takes `off` for false, where `progress: off` is a word.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise UserError(
                    f"line {key_node.start_mark.line + 1}: a list or map as a name; names of settings are words"
                )
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise UserError(f"{key}: written twice (line {key_node.start_mark.line + 1}); keep one")
            seen.add(key)
        return super().construct_mapping(node, deep)


_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOLEAN]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_implicit_resolver(_BOOLEAN, re.compile("^(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> LoadedConfig:
    """Read a YAML file, apply `key.sub=value` overrides, and validate the whole.

    Raises UserError naming the setting, its value and the way out.
    """
    tree, notes = _rename(_read_yaml(Path(path)))
    for override in overrides:
        name, value = _parse_override(override)
        dotted, note = canonical(name)
        notes += [note] if note else []
        _assign(tree, dotted, value)
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise UserError(first_mistake(error)) from None
    check_combinations(config)
    return LoadedConfig(config, tuple(notes))


def dump_yaml(config: RunConfig) -> str:
    """The resolved configuration as YAML that `load_config` reads back to the same value."""
    return str(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


def _read_yaml(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a YAML file in it")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; presets are in configs/") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text ({error})") from None
    try:
        tree = yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: something like a date that is none
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{path}: not valid YAML{where}: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(tree, dict):
        held = "nothing" if tree is None else f"a {'list' if isinstance(tree, list) else 'single value'}, not settings"
        raise UserError(f"{path}: holds {held}; write `base_model: ...` and so on")
    return tree


def _parse_override(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise UserError(f"{text}: not an override; write key=value, such as training.learning_rate=1e-4")
    try:
        return name.strip(), yaml.load(value, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError):
        return name.strip(), value


def _rename(tree: dict[Any, Any]) -> tuple[dict[str, Any], list[str]]:
    """Move names of other trainers to ours, and dotted keys to their sections."""
    renamed: dict[str, Any] = {}
    notes: list[str] = []
    written_as: dict[str, str] = {}
    for key, value in tree.items():
        if key in RunConfig.model_fields and isinstance(value, dict):
            renamed.setdefault(key, {})
            entries = [(f"{key}.{inner}", inner_value) for inner, inner_value in value.items()]
        elif key in RunConfig.model_fields and value is None and key not in ("base_model", "output_dir", "dataset"):
            entries = []  # `lora:` with nothing under it means the defaults
        else:
            entries = [(str(key), value)]
        for name, entry in entries:
            dotted, note = canonical(name)
            notes += [note] if note else []
            if dotted in written_as:
                raise UserError(f"{name}: given as {written_as[dotted]} as well, which is the same setting; keep one")
            written_as[dotted] = name
            _assign(renamed, dotted, _rename_source(entry, notes) if dotted in SOURCES else entry)
    return renamed, notes


def _rename_source(entry: Any, notes: list[str]) -> Any:
    """The same for the names inside one source of examples, or inside each of several."""
    if isinstance(entry, list):
        return [_rename_source(source, notes) for source in entry]
    if not isinstance(entry, dict):
        return entry
    notes += [f"{name} of a source is read as {ours}" for name, ours in SOURCE_ALIASES.items() if name in entry]
    return {SOURCE_ALIASES.get(name, name): value for name, value in entry.items()}


def _assign(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, last = dotted.split(".")
    node = tree
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            raise UserError(f"{dotted}={shown(value)}: {section} is {shown(child)}, not a section; remove one of them")
        node = child
    node[last] = value
