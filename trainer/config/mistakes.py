"""Collect the mistakes of a configuration, ordered by line of the file, then the command line."""

import copy
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from trainer.config.aliases import ALIASES, ELSEWHERE
from trainer.config.checks import find_invalid_combinations
from trainer.config.errors import Mistake, shown
from trainer.config.messages import describe_errors, section_wanted, setting_names
from trainer.config.needs import Unread, find_unread_settings, switch_value, unread_mistake
from trainer.config.sections import RunConfig
from trainer.config.training_sections import FRACTIONS
from trainer.config.zero import gathers_by_layer

# Values for missing settings without a default, so that the other settings can be checked.
_PLACEHOLDERS: dict[str, Any] = {"base_model": "x", "output_dir": "x", "dataset": {"path": "x"}}


class Mistakes:
    """Mistakes, each with the name as typed and the line of the file or `command line`."""

    def __init__(self, path: Path, lines: Mapping[str, int]) -> None:
        self.names: dict[str, str] = {}
        """Map of our names to the names that were typed."""
        self.fractions: dict[str, float] = {}
        """Numbers of steps that were given as fractions of the run."""
        self._path, self._lines = path, lines
        self._positions = {name: position for position, name in enumerate(lines)}
        self._overridden: dict[str, int] = {}
        self._found: dict[str, tuple[tuple[int, int], Mistake | str]] = {}

    def override(self, name: str) -> None:
        """Attribute later mistakes of this setting to the command line."""
        self._overridden.setdefault(name, len(self._overridden))

    def add(self, mistake: Mistake) -> None:
        """Add a mistake of a setting; only the first of a setting is reported."""
        order, place = self._place(mistake.setting)
        name = mistake.name or self.names.get(mistake.setting, "")
        value = self.fractions.get(mistake.setting, mistake.value)
        self._found.setdefault(mistake.setting, (order, replace(mistake, name=name, place=place, value=value)))

    def add_twice(self, dotted: str, name: str) -> None:
        """Add a setting that is given as `name` after it was given under another name."""
        problem = f"also given as {self.names[dotted]}, which is the same setting"
        if self.names[dotted] == name:
            problem = "given twice, with dots and in its section"
        place = f" ({self._path}:{self._lines[name]})" if name in self._lines else ""
        mistake = Mistake(name, None, problem, "keep one", place=place)
        self._found.setdefault(name, ((0, self._positions.get(name, 0)), mistake))

    def add_line(self, line: int, message: str) -> None:
        """Add a mistake that names its line of the file."""
        positions = [self._positions[name] for name, at in self._lines.items() if at <= line]
        self._found.setdefault(message, ((0, max(positions, default=0)), message))

    def add_override(self, text: str, message: str) -> None:
        """Add an override that cannot be read."""
        self._found.setdefault(text, ((2, len(self._overridden)), message))

    def add_values(self, error: ValidationError) -> None:
        """Add pydantic's errors, except settings that are missing only because their name is misspelt."""
        found = describe_errors(error)
        explained = {*self._found, *(name for mistake in found for name in mistake.involves.split())}
        for mistake in found:
            if mistake.involves or self._is_given(mistake.setting) or not mistake.concerns(explained):
                self.add(mistake)

    def add_combinations(self, config: RunConfig) -> dict[str, list[Unread]]:
        """Add invalid combinations, except those that involve an invalid setting.

        Returns the settings that were switched off on purpose, by the reason why they have no effect.
        """
        entries = [(name, found) for name, (_, found) in self._found.items()]
        doubtful = set().union(*(found.settings if isinstance(found, Mistake) else {name} for name, found in entries))
        unread, left_out = self._unread(config, doubtful)
        for mistake in (*find_invalid_combinations(config), *unread):
            if not mistake.concerns(doubtful):
                self.add(mistake)
        return left_out

    def _unread(self, config: RunConfig, doubtful: Set[str]) -> tuple[list[Mistake], dict[str, list[Unread]]]:
        """Return a mistake for each reason why given settings have no effect, and those without effect on purpose.

        Settings in `doubtful` have a mistake of their own.
        """
        mistaken: dict[str, list[Unread]] = {}
        left_out: dict[str, list[Unread]] = {}
        if config.zero.stage == 3 and config.zero.gather == "auto":
            gather = "layer" if gathers_by_layer(config) else "module"
            config = config.model_copy(update={"zero": config.zero.model_copy(update={"gather": gather})})
        names = setting_names()
        for found in find_unread_settings(config):
            section = found.name.partition(".")[0]
            is_whole = all(self._is_given(each) for each in names if each.startswith(f"{section}."))
            if not self._is_given(found.name) or found.name in doubtful:
                continue
            if is_whole and found.is_default:  # a run's record has all settings
                continue
            on_purpose = is_whole or found.need.replaces or self._is_switched_off(found, config)
            (left_out if on_purpose else mistaken).setdefault(found.need.reason(config), []).append(found)
        return [unread_mistake(settings, reason) for reason, settings in mistaken.items()], left_out

    def _is_given(self, dotted: str) -> bool:
        return any(dotted == name or dotted.startswith(f"{name}.") for name in self.names)

    def _is_switched_off(self, found: Unread, config: RunConfig) -> bool:
        """Return whether the switch was given as off, or on the command line for a setting of the file."""
        is_in_file = self._place(found.name)[0][0] < 2
        return any(
            self._is_given(name) and (not switch_value(config, name) or (is_in_file and self._place(name)[0][0] == 2))
            for name in found.need.switch.split()
        )

    def count_in_file(self) -> int:
        """Return the number of mistakes in the file, excluding the command line."""
        return sum(order[0] < 2 for order, _ in self._found.values())

    def sorted_mistakes(self) -> list[Mistake | str]:
        """Return all mistakes in order."""
        return [mistake for _, mistake in sorted(self._found.values(), key=lambda found: (found[0], str(found[1])))]

    def _place(self, dotted: str) -> tuple[tuple[int, int], str]:
        """Return the position of a setting among the mistakes, and the text that names it."""
        for name, number in self._overridden.items():
            if dotted == name or dotted.startswith(f"{name}."):
                return (2, number), " (command line)"
        parts = dotted.split(".")
        for length in range(len(parts), 0, -1):
            above, below = ".".join(parts[:length]), parts[length:]
            typed = ".".join([self.names.get(above, above), *below])
            if typed in self._lines:
                return (0, self._positions[typed]), f" ({self._path}:{self._lines[typed]})"
        return (1, 0), ""


def replace_mistakes(tree: Mapping[str, Any], error: ValidationError) -> RunConfig | None:
    """Return the configuration with defaults for invalid settings, or None, so that the others can be checked."""
    valid = copy.deepcopy(dict(tree))
    for mistake in describe_errors(error):
        remove_setting(valid, mistake.setting.split("."))
    try:
        return RunConfig.model_validate(_PLACEHOLDERS | valid)
    except ValidationError:
        return None


def remove_setting(tree: dict[str, Any], path: list[str]) -> None:
    """Remove a setting; for an entry of a list of strings, the whole list."""
    node: Any = tree
    above, name = tree, path[0]
    for part in path:
        if isinstance(node, dict):
            above, name, node = node, part, node.get(part)
        elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        else:
            break
    above.pop(name, None)


class Given:
    """The tree to validate, the names under which settings were given, and notes on translated settings."""

    def __init__(self, path: Path, lines: Mapping[str, int]) -> None:
        self.tree: dict[str, Any] = {}
        self.notes: list[str] = []
        self.mistakes = Mistakes(path, lines)

    @property
    def names(self) -> dict[str, str]:
        """Map of our names to the names that were typed."""
        return self.mistakes.names

    def add_file(self, tree: Mapping[Any, Any]) -> None:
        """Add the settings of a file; a setting given under two names is a mistake."""
        for name, value in self._entries(tree):
            self._add(name, value)

    def override(self, name: str, value: Any) -> None:
        """Use this value instead of the file's."""
        self._add(name, value, replace=True)

    def leave_out(self, unread: Mapping[str, list[Unread]]) -> None:
        """Remove settings without effect, with a note; settings that another one replaces are only noted."""
        for reason, settings in unread.items():
            for setting in settings:
                if not setting.need.replaces:
                    remove_setting(self.tree, setting.name.split("."))
            names = ", ".join(self.names.get(setting.name, setting.name) for setting in settings)
            self.notes.append(f"{names}: no effect, because {reason}")

    def _entries(self, tree: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in tree.items():
            field = RunConfig.model_fields.get(key) if isinstance(key, str) else None
            kind = field.annotation if field else None
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                if isinstance(value, dict):
                    self.tree.setdefault(key, {})
                    yield from ((f"{key}.{_show_key(inner)}", inner_value) for inner, inner_value in value.items())
                elif value is not None:
                    self.mistakes.add(section_wanted(key, kind, value))
                elif key == "dataset":
                    yield key, value
            elif value is not None or key != "seed":  # an empty section or seed means the default
                yield _show_key(key), value

    def _add(self, name: str, value: Any, *, replace: bool = False) -> None:
        if replace:
            self.mistakes.override(name)
        if (name in ELSEWHERE and value in (None, [], {}, "")) or (name in ALIASES and value is None):
            self.notes.append(f"{name}: empty, ignored")
        elif name in ELSEWHERE:
            self.mistakes.add(Mistake(name, value, "not a setting here", ELSEWHERE[name]))
        else:
            if name in ALIASES:
                self.notes.append(f"{name} is read as {ALIASES[name]}")
            self._put(ALIASES.get(name, name), value, name, replace)

    def _put(self, dotted: str, value: Any, name: str, replace: bool) -> None:
        *sections, last = dotted.split(".")
        node = self.tree
        for section in sections:
            child = node.setdefault(section, {})
            if not isinstance(child, dict):
                problem = f"{section} is {shown(child)}, not a section"
                self.mistakes.add(Mistake(name, shown(value), problem, "remove one of them", name=dotted))
                return
            node = child
        if replace:
            self.mistakes.override(dotted)
        elif dotted in self.names and node[last] != value:
            self.mistakes.add_twice(dotted, name)
            return
        self.names[dotted] = name
        self.mistakes.fractions.pop(dotted, None)
        if last in FRACTIONS and isinstance(value, float):
            self.mistakes.fractions[dotted] = value
        node[last] = value


def _show_key(key: Any) -> str:
    return key if isinstance(key, str) else "null" if key is None else shown(key)
