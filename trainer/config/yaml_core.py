"""YAML as its version 1.2 reads it (the core schema): `010` is ten, `1e-4` a number; `1:30`, `yes` and dates are text.

Readers of YAML 1.1, PyYAML among them, take these for 8, text, 90, true and a date.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.config.errors import UserError

MOST_BYTES = 8 * 2**20
MOST_VALUES = 100_000
"""Far beyond any configuration; anchors that repeat anchors reach billions in a few lines."""

# What PyYAML raises for a value that its explicit tag, such as !!bool, does not allow.
OF_TAGS = (ValueError, KeyError, TypeError, AttributeError)
_RULES = {
    "null": (r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    "bool": (r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    "int": (r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    "float": (
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+.0123456789"),
    ),
    "merge": (r"^<<$", ["<"]),
}


@dataclass(frozen=True)
class YamlFile:
    """What a file holds, and the line at which each dotted name is written."""

    tree: dict[Any, Any]
    lines: dict[str, int]
    mistakes: list[tuple[int, str]]
    """Line and text of what YAML takes and a configuration may not have: keys written twice."""


class Yaml11Loader(yaml.SafeLoader):
    """Read YAML 1.1 as Axolotl (PyYAML) and LLaMA-Factory (OmegaConf) do, and note keys that are written twice.

    The last of several values of a key counts. Dates are text, as OmegaConf has it, and other types have no tags.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {  # noqa: RUF012 (PyYAML's own name)
        first: [(tag, pattern) for tag, pattern in rules if not tag.endswith(":timestamp")]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.mistakes: list[tuple[int, str]] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise UserError(f"line {line}: a list or map as a name; names of settings are words")
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                self.mistakes.append((line, f"{key}: written twice (line {line}, first in line {seen[key]}); keep one"))
            seen.setdefault(key, line)
        return super().construct_mapping(node, deep)


for _tag in ("binary", "timestamp", "omap", "pairs", "set"):
    Yaml11Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", yaml.SafeLoader.yaml_constructors[None])


class _CoreLoader(Yaml11Loader):
    """Read YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own name)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        base = {"0o": 8, "0x": 16}.get(text[:2])
        return int(text[2:], base) if base else int(text)


for _name, (_pattern, _first) in _RULES.items():
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), _first)
_CoreLoader.add_constructor("tag:yaml.org,2002:int", _CoreLoader.construct_yaml_int)


class _CoreDumper(yaml.SafeDumper):
    """Quotes what either version of YAML would read as something else than text."""


for _name, (_pattern, _first) in _RULES.items():
    _CoreDumper.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), _first)


def dump(tree: Any, **style: Any) -> str:
    """Return YAML that `parse`, and readers of YAML 1.1, take for the same values; `style` is for PyYAML."""
    return str(yaml.dump(tree, Dumper=_CoreDumper, sort_keys=False, allow_unicode=True, **style))


def parse(text: str) -> Any:
    """The value of a piece of YAML, all of which must belong to it. Raises ValueError or UserError."""
    try:
        loader = _CoreLoader(text)  # which refuses control characters
        try:
            node = loader.get_single_node()
            if node is None or node.end_mark.index != len(text):
                raise ValueError("a comment, which on a command line is text")
            value = loader.construct_document(node)
            for _, mistake in loader.mistakes:
                raise UserError(mistake)
            return value
        finally:
            loader.dispose()
    except (yaml.YAMLError, RecursionError, *OF_TAGS) as error:
        raise ValueError(str(error)) from None


def plain(text: str) -> Any:
    """The value of a scalar without quotes: everything is part of it, a `#` and a colon as well."""
    loader = _CoreLoader("")
    try:
        tag = loader.resolve(yaml.ScalarNode, text.strip(), (True, False))
        value: Any = loader.construct_object(yaml.ScalarNode(tag, text.strip()))
    except (ValueError, yaml.YAMLError):  # more digits than Python reads; `<<`
        return text
    finally:
        loader.dispose()
    return text if isinstance(value, str) else value


def read_yaml(path: Path, loader_class: type[Yaml11Loader] = _CoreLoader) -> YamlFile:
    """Return the settings in a file. Raises UserError for everything else that a path can lead to."""
    return yaml_of(path, read_text(path), loader_class)


def yaml_of(path: Path, text: str, loader_class: type[Yaml11Loader] = _CoreLoader) -> YamlFile:
    """Return the settings in a text, which is or may become the content of the file."""
    try:
        loader = loader_class(text)
        try:
            node = loader.get_single_node()
            _values_of(node, {}, path)
            tree = None if node is None else loader.construct_document(node)
            mistakes = loader.mistakes
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(
            f"{path}: not valid YAML at line {line}: the character {text[error.position]!r} is no text; "
            "name a YAML file"
        ) from None
    except RecursionError:
        raise UserError(f"{path}: not valid YAML: brackets nested hundreds deep; name a file of settings") from None
    except (yaml.YAMLError, *OF_TAGS) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or " ".join(f"a tag that does not fit ({error})".split())
        raise UserError(f"{path}: not valid YAML{where}: {problem}{_hint(problem)}") from None
    if not isinstance(tree, dict):
        held = "nothing" if tree is None else f"a {'list' if isinstance(tree, list) else 'single value'}, not settings"
        raise UserError(f"{path}: holds {held}; write `base_model: ...` and so on")
    lines: dict[str, int] = {}
    _note_lines(node, "", lines)
    return YamlFile(tree, lines, mistakes)


def _hint(problem: str) -> str:
    if problem.startswith("but found another document"):
        return "; one file holds one configuration, remove the ---"
    return "; put text with a colon in quotes" if problem.startswith("mapping values are not allowed") else ""


def read_text(path: Path) -> str:
    """The text of a file. Raises UserError if it is none."""
    try:
        if path.is_dir():
            raise UserError(f"{path}: is a folder; name a YAML file in it")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        if "=" in str(path) and path.suffix not in (".yaml", ".yml"):
            raise UserError(f"{path}: is a setting; name the YAML file of the run before it") from None
        raise UserError(f"{path}: no such file; presets are in configs/") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name a YAML file that you may read") from None
    if len(content) > MOST_BYTES:
        raise UserError(f"{path}: more than {MOST_BYTES >> 20} MiB, which is no configuration; name a YAML file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}: cannot be read as text (line {line}: byte 0x{content[error.start]:02x} is not UTF-8); "
            "name a YAML file, or save this one as UTF-8"
        ) from None


def _values_of(node: yaml.Node | None, known: dict[int, int], path: Path) -> int:
    """How many values a node stands for when every anchor is written out. Raises UserError for too many."""
    if node is None or isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) in known:
        if not known[id(node)]:
            raise UserError(f"{path}: line {node.start_mark.line + 1}: an anchor within itself; write the value out")
        return known[id(node)]
    known[id(node)] = 0  # not counted to the end
    inner = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
    total = 1 + sum(_values_of(part, known, path) for part in inner)
    if total > MOST_VALUES:
        raise UserError(f"{path}: more than {MOST_VALUES:,} values, which is no configuration; name a YAML file")
    known[id(node)] = total
    return total


def _note_lines(node: yaml.Node | None, prefix: str, lines: dict[str, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                lines[f"{prefix}{key.value}"] = key.start_mark.line + 1
                _note_lines(value, f"{prefix}{key.value}.", lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines.setdefault(f"{prefix}{index}", value.start_mark.line + 1)
            _note_lines(value, f"{prefix}{index}.", lines)
