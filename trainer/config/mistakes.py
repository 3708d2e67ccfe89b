"""Collect the mistakes in a configuration file and on the command line."""

import copy
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from trainer.config.aliases import ALIASES, REPLACEMENT_ADVICE
from trainer.config.checks import find_invalid_combinations
from trainer.config.errors import Mistake, to_text
from trainer.config.messages import build_section_mistake, describe_errors, list_setting_names
from trainer.config.needs import UnusedSetting, build_unused_settings_mistake, find_unused_settings, read_switch_value
from trainer.config.sections import RunConfig
from trainer.config.zero import gathers_per_layer

# Values for missing required settings, so that the other settings can be checked.
_PLACEHOLDERS: dict[str, Any] = {"base_model": "x", "output_dir": "x", "dataset": {"path": "x"}}


class Mistakes:
    """Collects mistakes under the names that the user typed, with their locations: a file line, or `command line`."""

    def __init__(self, path: Path, lines: Mapping[str, int], texts: Mapping[str, str]) -> None:
        self.names: dict[str, str] = {}
        """Names of the configured settings as typed, by canonical name."""
        self.texts = dict(texts)
        """Values as typed, such as 2e4, by typed name."""
        self._path, self._lines = path, lines
        self._positions = {name: position for position, name in enumerate(lines)}
        self._overridden: dict[str, int] = {}
        self._entries: dict[str, tuple[tuple[int, int], Mistake | str]] = {}

    def mark_overridden(self, name: str) -> None:
        """Attribute later mistakes in this setting to the command line."""
        self._overridden.setdefault(name, len(self._overridden))

    def add(self, mistake: Mistake) -> None:
        """Add a mistake. Only the first mistake for each setting is kept."""
        order, location = self._locate(mistake.setting)
        name = mistake.name or self.names.get(mistake.setting, "")
        is_number, typed = type(mistake.value) in (int, float), self.names.get(mistake.setting, mistake.setting)
        value = self.texts.get(typed, mistake.value) if is_number else mistake.value
        self._entries.setdefault(mistake.setting, (order, replace(mistake, name=name, location=location, value=value)))

    def add_duplicate(self, dotted: str, name: str) -> None:
        """Add a mistake for a setting that was given a second time, as `name`."""
        problem = f"also given as {self.names.get(dotted)}, which is the same setting"
        if self.names.get(dotted, name) == name:
            problem = "given twice, as a dotted name and in its section"
        location = f" ({self._path}:{self._lines[name]})" if name in self._lines else ""
        mistake = Mistake(name, None, problem, "keep one", location=location)
        self._entries.setdefault(name, ((0, self._positions.get(name, 0)), mistake))

    def add_line_error(self, line: int, message: str) -> None:
        positions = [self._positions[name] for name, at in self._lines.items() if at <= line]
        self._entries.setdefault(message, ((0, max(positions, default=0)), message))

    def add_override_error(self, text: str, message: str) -> None:
        self._entries.setdefault(text, ((2, len(self._overridden)), message))

    def add_validation_errors(self, error: ValidationError) -> None:
        """Add pydantic's errors, except for settings that are missing only because their names are misspelled."""
        found_mistakes = describe_errors(error)
        explained = {*self._entries, *(name for mistake in found_mistakes for name in mistake.involves.split())}
        for mistake in found_mistakes:
            is_configured = self._is_configured(mistake.setting) and mistake.problem != "missing"
            if mistake.involves or is_configured or not mistake.concerns(explained):
                self.add(mistake)

    def add_invalid_combinations(self, config: RunConfig) -> dict[str, list[UnusedSetting]]:
        """Add a mistake for each invalid combination. Return settings that are unused on purpose, by reason."""
        entries = [(name, entry) for name, (_, entry) in self._entries.items()]
        invalid = set().union(*(entry.settings if isinstance(entry, Mistake) else {name} for name, entry in entries))
        unused, intended = self._classify_unused_settings(config, invalid)
        for mistake in (*find_invalid_combinations(config), *unused):
            if not mistake.concerns(invalid):
                self.add(mistake)
        return intended

    def _classify_unused_settings(
        self, config: RunConfig, invalid: Set[str]
    ) -> tuple[list[Mistake], dict[str, list[UnusedSetting]]]:
        """Find configured settings that have no effect.

        Returns a mistake per reason, and the settings that are unused on purpose, keyed by reason. Settings in
        `invalid` already have a mistake and are skipped.
        """
        mistaken: dict[str, list[UnusedSetting]] = {}
        intended: dict[str, list[UnusedSetting]] = {}
        if config.zero.stage == 3 and config.zero.gather == "auto":
            gather = "layer" if gathers_per_layer(config) else "module"
            config = config.model_copy(update={"zero": config.zero.model_copy(update={"gather": gather})})
        names = list_setting_names()
        for unused in find_unused_settings(config):
            section = unused.name.partition(".")[0]
            is_complete = all(self._is_configured(name) for name in names if name.startswith(f"{section}."))
            if not self._is_configured(unused.name) or unused.name in invalid:
                continue
            if is_complete and unused.is_default:  # a recorded configuration contains all settings
                continue
            is_intended = is_complete or unused.unmet.replaces or self._is_switch_turned_off(unused, config)
            reason = unused.unmet.describe_reason(config)
            (intended if is_intended else mistaken).setdefault(reason, []).append(unused)
        return [build_unused_settings_mistake(settings, reason) for reason, settings in mistaken.items()], intended

    def _is_configured(self, dotted: str) -> bool:
        return any(dotted == name or dotted.startswith(f"{name}.") for name in self.names)

    def _is_switch_turned_off(self, unused: UnusedSetting, config: RunConfig) -> bool:
        """Return whether the user turned off the switch that an unused setting needs.

        Also true if the setting is in the file and its switch was overridden on the command line.
        """
        is_in_file = not self._is_overridden(unused.name)
        return any(
            self._is_configured(name)
            and (not read_switch_value(config, name) or (is_in_file and self._is_overridden(name)))
            for name in unused.unmet.switch.split()
        )

    def _is_overridden(self, dotted: str) -> bool:
        return self._locate(dotted)[0][0] == 2

    def count_in_file(self) -> int:
        return sum(order[0] < 2 for order, _ in self._entries.values())

    def list_sorted(self) -> list[Mistake | str]:
        """Return all mistakes: those in the file by line, then those on the command line."""
        return [mistake for _, mistake in sorted(self._entries.values(), key=lambda entry: (entry[0], str(entry[1])))]

    def _locate(self, dotted: str) -> tuple[tuple[int, int], str]:
        """Return the sort key for mistakes in a setting, and the setting's location as text."""
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


def replace_invalid_settings(tree: Mapping[str, Any], error: ValidationError) -> RunConfig | None:
    """Return the configuration with defaults in place of invalid settings; None if it is still invalid."""
    valid = copy.deepcopy(dict(tree))
    for mistake in describe_errors(error):
        remove_setting(valid, mistake.setting.split("."))
    try:
        return RunConfig.model_validate(_PLACEHOLDERS | valid)
    except ValidationError:
        return None


def remove_setting(tree: dict[str, Any], path: list[str]) -> None:
    """Remove a setting, or the entire list if the path leads into a list of strings."""
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


class UserSettings:
    """Collects the settings to validate, and notes on settings that were translated or ignored."""

    def __init__(self, path: Path, lines: Mapping[str, int], texts: Mapping[str, str]) -> None:
        self.tree: dict[str, Any] = {}
        self.notes: list[str] = []
        self.mistakes = Mistakes(path, lines, texts)

    def add_file(self, tree: Mapping[Any, Any]) -> None:
        """Add the settings from a file. A setting given under two names is a mistake."""
        for key, value in tree.items():
            field = RunConfig.model_fields.get(key) if isinstance(key, str) else None
            kind = field.annotation if field else None
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                if isinstance(value, dict):
                    self.tree.setdefault(key, {})
                    for inner, inner_value in value.items():
                        self.add(f"{key}.{_format_key(inner)}", inner_value)
                elif value is not None:
                    self.mistakes.add(build_section_mistake(key, kind, value))
                elif key == "dataset":
                    self.add(key, value)
            elif value is not None or key != "seed":  # an empty section or seed means the default
                self.add(_format_key(key), value)

    def remove_unused(self, unused: Mapping[str, list[UnusedSetting]]) -> None:
        """Remove settings that have no effect, except those that another replaces, and note each reason."""
        for reason, settings in unused.items():
            for setting in settings:
                if not setting.unmet.replaces:
                    remove_setting(self.tree, setting.name.split("."))
            names = ", ".join(self.mistakes.names.get(setting.name, setting.name) for setting in settings)
            self.notes.append(f"{names}: ignored, because {reason}")

    def add(self, name: str, value: Any, *, override: bool = False) -> None:
        """Add a setting under any of its names. If `override` is set, replace the file's value."""
        if override:
            self.mistakes.mark_overridden(name)
        if (name in REPLACEMENT_ADVICE and value in (None, [], {}, "")) or (name in ALIASES and value is None):
            self.notes.append(f"{name}: empty, ignored")
        elif name in REPLACEMENT_ADVICE:
            self.mistakes.add(Mistake(name, value, "not a zerolora setting", REPLACEMENT_ADVICE[name]))
        else:
            if name in ALIASES:
                self.notes.append(f"{name} is read as {ALIASES[name]}")
            self._set_value(ALIASES.get(name, name), value, name, override)

    def _set_value(self, dotted: str, value: Any, name: str, override: bool) -> None:
        *sections, last = dotted.split(".")
        node = self.tree
        for section in sections:
            child = node.setdefault(section, {})
            if not isinstance(child, dict):
                problem = f"{section} is {to_text(child)}, not a section"
                fix = "set the whole list" if isinstance(child, list) else "remove one of them"
                self.mistakes.add(Mistake(name, to_text(value), problem, fix, name=dotted))
                return
            node = child
        if override:
            self.mistakes.mark_overridden(dotted)
        elif last in node and node[last] != value:
            self.mistakes.add_duplicate(dotted, name)
            return
        self.mistakes.names[dotted] = name
        node[last] = value


def _format_key(key: Any) -> str:
    return key if isinstance(key, str) else "null" if key is None else to_text(key)
