"""Settings as given in the file and on the command line, collected under our names."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from trainer.config.aliases import ALIASES, ELSEWHERE
from trainer.config.errors import Mistake, shown
from trainer.config.messages import section_wanted
from trainer.config.mistakes import Mistakes, remove_setting
from trainer.config.needs import Unread
from trainer.config.sections import RunConfig
from trainer.config.training_sections import FRACTIONS


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
                    yield from ((f"{key}.{inner}", inner_value) for inner, inner_value in value.items())
                elif value is not None:
                    self.mistakes.add(section_wanted(key, kind, value))
                elif key == "dataset":
                    yield key, value
            elif value is not None or key != "seed":  # an empty section or seed means the default
                yield str(key), value

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
