"""`zerolora validate --fix`: what can be set right without asking, in the text of the file, comments and all.

Names that are misspelt or another trainer's, and values that are a word misspelt or a number where true or false is
wanted. Each change is kept only if the file then has fewer mistakes.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from trainer.config.aliases import ALIASES
from trainer.config.errors import UserError, UserErrors, nearest
from trainer.config.load import load_text
from trainer.config.messages import annotation_of
from trainer.config.source_dialect import RENAMED
from trainer.config.values import words
from trainer.config.yaml_core import read_text

_UNKNOWN = re.compile(r"([\w.]+): unknown setting; did you mean ([\w.]+)\?")
_WORD = re.compile(r"([\w.]+)=([^:]*): must be '")
_TRUTH = re.compile(r"([\w.]+)=([^:]*): must be true or false.*; write (true|false)")
LIKELY = 0.8


def repaired(path: Path) -> tuple[str, list[str]]:
    """The text of the file with what can be mended mended, and a line for each mistake that is left.

    Raises UserError for what is no YAML of settings at all.
    """
    text = read_text(path)
    text = _with_our_names(path, text)
    mistakes = _mistakes(path, text)
    for _ in range(len(mistakes)):
        for mistake in mistakes:
            changed = _without(mistake, text)
            left = _mistakes(path, changed) if changed != text else mistakes
            if len(left) < len(mistakes):
                text, mistakes = changed, left
                break
        else:
            break
    return text, mistakes


def _mistakes(path: Path, text: str) -> list[str]:
    """What is wrong with a text, as if it stood in the file."""
    try:
        load_text(path, text)
    except UserErrors as errors:
        return errors.messages
    except UserError as error:
        return [str(error)]
    return []


def _with_our_names(path: Path, text: str) -> str:
    """Other trainers' names that have a single one here, where that changes nothing else."""
    before = _mistakes(path, text)
    for name, node in _names(text):
        ours = ALIASES.get(name)
        last = name.rpartition(".")[2]
        if ours is None and re.fullmatch(r"dataset\.mix\.\d+\.\w+|dataset\.evaluation\.\w+", name):
            ours = name.removesuffix(last) + RENAMED[last] if last in RENAMED else None
        changed = _renamed(text, name, ours, node) if ours else text
        if changed != text and len(_mistakes(path, changed)) == len(before):
            return _with_our_names(path, changed)
    return text


def _without(mistake: str, text: str) -> str:
    """The text after the change that a mistake asks for, if it is one that can be made."""
    nodes = dict(_names(text))
    if (found := _UNKNOWN.match(mistake)) and found.group(1) in nodes:
        return _renamed(text, found.group(1), found.group(2), nodes[found.group(1)])
    if (found := _TRUTH.match(mistake)) and (value := _value_of(text, found.group(1))):
        return _spliced(text, value, found.group(3))
    if (found := _WORD.match(mistake)) and (value := _value_of(text, found.group(1))):
        close = nearest(found.group(2), words(annotation_of(_ours(found.group(1)))), LIKELY)
        return _spliced(text, value, close) if close else text
    return text


def _ours(name: str) -> str:
    return re.sub(r"\.\d+", "", ALIASES.get(name, name)) if ".mix." not in name else f"dataset.{name.split('.')[-1]}"


def _renamed(text: str, name: str, ours: str, node: yaml.Node) -> str:
    """The key in place: within its section its last part, at the top of the file the dotted name."""
    section, _, _ = name.rpartition(".")
    written = str(node.value)
    top = name == written
    if top:
        return _spliced(text, node, ours)
    if ours.rpartition(".")[0] == section:
        return _spliced(text, node, ours.rpartition(".")[2])
    return text


def _spliced(text: str, node: yaml.Node, new: str) -> str:
    return text[: node.start_mark.index] + new + text[node.end_mark.index :]


def _names(text: str) -> list[tuple[str, yaml.Node]]:
    """Dotted name and node of each key, in the order of the file."""
    return [(name, key) for name, key, _ in _pairs(_root(text), "")]


def _value_of(text: str, name: str) -> yaml.Node | None:
    found = (value for at, _, value in _pairs(_root(text), "") if at == name and isinstance(value, yaml.ScalarNode))
    return next(found, None)


def _root(text: str) -> yaml.Node | None:
    try:
        root: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return None
    return root


def _pairs(node: Any, prefix: str) -> list[tuple[str, yaml.Node, yaml.Node]]:
    found: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                found.append((f"{prefix}{key.value}", key, value))
                found += _pairs(value, f"{prefix}{key.value}.")
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            found += _pairs(item, f"{prefix}{index}.")
    return found
