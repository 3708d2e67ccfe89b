"""Read and write YAML 1.2 (the core schema): `010` is 10, `1e-4` is a number, and `1:30`, `yes` and dates are strings.

In YAML 1.1, and therefore in PyYAML, they are 8, a string, 90, true and a date.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.config.errors import UserError
from trainer.config.files import UnreadableFileError, decode_text, read_bytes

MAX_BYTES = 8 * 2**20
MAX_VALUES = 100_000
"""Limit on the expansion of nested anchors, which can produce billions of values in a few lines."""
_DATA_FILES = (".jsonl", ".ndjson", ".csv", ".tsv", ".txt", ".md")
_RECORDS = re.compile(r"\s*(\[\s*\{|\{.*\n\{)")
_SETTINGS = re.compile(r"^(base_model|dataset|training|adapters)\s*:", re.MULTILINE)
MISSING_FILE_FIX = "check its name, or use a preset in configs/"
# The beginning of PyYAML's error message -> how to fix the error.
_HINTS = {
    "but found another document": "write one configuration per file, without ---",
    "expected <block end>": "indent the settings of a section equally",
    "could not determine a constructor for the tag": "remove the tag, which begins with !",
    "expected '<document start>'": "write settings as `name: value`, without lines of `...` or %YAML",
    "found character '\\t'": "indent with spaces, not tabs",
    "mapping values are not allowed": "put text with a colon in quotes",
}
# Raised by PyYAML for a value that does not match its explicit tag, such as !!bool.
TAG_ERRORS = (ValueError, KeyError, TypeError, AttributeError)
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
    """The content of a YAML file, and the line and text of each dotted name."""

    tree: dict[Any, Any]
    lines: dict[str, int]
    texts: dict[str, str]
    mistakes: list[tuple[int, str]]
    """Line and message for each duplicate key, which PyYAML allows but a configuration does not."""


class Yaml11Loader(yaml.SafeLoader):
    """Loads YAML 1.1 as Axolotl (PyYAML) and LLaMA-Factory (OmegaConf) do, and records duplicate keys.

    The last value of a duplicate key wins. Dates are strings, as in OmegaConf; tags of other types are rejected.
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
                problem = "a list or mapping as a key; write the name of a setting"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key_node.start_mark)
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                self.mistakes.append((line, f"{key}: duplicate (line {line}, first in line {seen[key]}); keep one"))
            seen.setdefault(key, line)
        return super().construct_mapping(node, deep)


for _tag in ("binary", "timestamp", "omap", "pairs", "set"):
    Yaml11Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", yaml.SafeLoader.yaml_constructors[None])


class _CoreLoader(Yaml11Loader):
    """Loads YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own name)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        base = {"0o": 8, "0x": 16}.get(text[:2])
        return int(text[2:], base) if base else int(text)


_CoreLoader.add_constructor("tag:yaml.org,2002:int", _CoreLoader.construct_yaml_int)


class _CoreDumper(yaml.SafeDumper):
    """Dumps YAML. Quotes strings that YAML 1.1 or 1.2 would parse as another type."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        lines_are_printable = "\n" in text and all(line.isprintable() for line in text.split("\n"))
        style = None if text.isprintable() else "|" if lines_are_printable else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_CoreDumper.add_representer(str, _CoreDumper.represent_text)
for _name, (_pattern, _first) in _RULES.items():
    for _class in (_CoreLoader, _CoreDumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), _first)


def dump(tree: Any, **style: Any) -> str:
    """Format values as YAML that has the same meaning in versions 1.1 and 1.2. `style` is passed to PyYAML."""
    return str(yaml.dump(tree, Dumper=_CoreDumper, sort_keys=False, allow_unicode=True, **style))


def parse_yaml_value(text: str) -> Any:
    """Parse YAML. Raises ValueError if it is invalid or contains a comment, UserError for duplicate keys."""
    try:
        loader = _CoreLoader(text)  # rejects control characters
        node = loader.get_single_node()
        if node is None or node.end_mark.index != len(text):
            raise ValueError("contains an unquoted #, which begins a comment")
        value = loader.construct_document(node)
        for _, mistake in loader.mistakes:
            raise UserError(mistake)
        return value
    except (yaml.YAMLError, RecursionError, *TAG_ERRORS) as error:
        raise ValueError(str(error)) from None


def parse_scalar(text: str) -> Any:
    """Parse an unquoted scalar, in which `#` and colons have no special meaning."""
    loader = _CoreLoader("")
    try:
        tag = loader.resolve(yaml.ScalarNode, text.strip(), (True, False))
        value: Any = loader.construct_object(yaml.ScalarNode(tag, text.strip()))
    except (ValueError, yaml.YAMLError):  # more digits than Python converts; `<<`
        return text
    return text if isinstance(value, str) else value


def read_yaml(path: Path, loader_class: type[Yaml11Loader] = _CoreLoader) -> YamlFile:
    """Return the settings in a file. Raises UserError if the file is unreadable, invalid or without settings."""
    fix = "check its name" if loader_class is Yaml11Loader else MISSING_FILE_FIX
    return parse_yaml(path, read_config_text(path, fix), loader_class)


def parse_yaml(path: Path, text: str, loader_class: type[Yaml11Loader] = _CoreLoader) -> YamlFile:
    """Parse the content of the file `path`. Raises UserError if it is invalid or without settings."""
    if _RECORDS.match(text) or (path.name.lower().endswith(_DATA_FILES) and not _SETTINGS.search(text)):
        raise UserError(f"{path}: contains data; pass the run's YAML file, and set dataset.path={path}")
    try:
        loader = loader_class(text)
        node = loader.get_single_node()
        _count_values(node, {}, path)
        tree = None if node is None else loader.construct_document(node)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(
            f"{path}: not valid YAML at line {line}: character {text[error.position]!r} is not allowed; "
            "check that this is a YAML file"
        ) from None
    except RecursionError:
        raise UserError(
            f"{path}: not valid YAML: nested too deeply; use a configuration file without deeply nested values"
        ) from None
    except (yaml.YAMLError, *TAG_ERRORS) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or " ".join(f"a tag that does not match its value ({error})".split())
        hint = next((f"; {hint}" for start, hint in _HINTS.items() if problem.startswith(start)), "")
        raise UserError(f"{path}: not valid YAML{where}: {problem}{hint}") from None
    if not isinstance(tree, dict):
        content = "is empty" if tree is None else f"is a {'list' if isinstance(tree, list) else 'single value'}"
        fix = "write `name: value`, not `name = value`" if " = " in text else "write settings such as `base_model: ...`"
        raise UserError(f"{path}: {content}; {fix}")
    lines, texts = dict[str, int](), dict[str, str]()
    _collect_lines(node, "", lines, texts)
    return YamlFile(tree, lines, texts, loader.mistakes)


def read_config_text(path: Path, fix: str = MISSING_FILE_FIX) -> str:
    """Return the text of a file. Raises UserError if it cannot be read; `fix` is the advice for a missing file."""
    try:
        return decode_text(read_bytes(path, MAX_BYTES), path)
    except FileNotFoundError:
        if "=" in str(path) and path.suffix not in (".yaml", ".yml"):
            raise UserError(f"{path}: is a setting; pass the run's YAML file before it") from None
        raise UserError(f"{path}: no such file; {fix}") from None
    except UnreadableFileError as error:
        raise UserError(f"{path}: {error.problem}; use a YAML configuration in UTF-8") from None


def _count_values(node: yaml.Node | None, known: dict[int, int], path: Path) -> int:
    """Return the number of values in a node with every alias expanded. Raises UserError if there are too many."""
    if node is None or isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) in known:
        if not known[id(node)]:
            line = f"{path}: line {node.start_mark.line + 1}"
            raise UserError(f"{line}: an alias refers to an anchor that contains it; write out the value")
        return known[id(node)]
    known[id(node)] = 0  # not counted yet
    inner = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
    total = 1 + sum(_count_values(part, known, path) for part in inner)
    if total > MAX_VALUES:
        raise UserError(f"{path}: more than {MAX_VALUES:,} values; use a configuration file with fewer")
    known[id(node)] = total
    return total


def _collect_lines(node: yaml.Node | None, prefix: str, lines: dict[str, int], texts: dict[str, str]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                lines[f"{prefix}{key.value}"] = key.start_mark.line + 1
                _collect_lines(value, f"{prefix}{key.value}.", lines, texts)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines.setdefault(f"{prefix}{index}", value.start_mark.line + 1)
            _collect_lines(value, f"{prefix}{index}.", lines, texts)
    elif node is not None:
        texts[prefix[:-1]] = node.value
