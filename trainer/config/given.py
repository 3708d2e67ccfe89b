"""Settings as they come in, gathered under our names: each once from the file, then from the command line."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from trainer.config.aliases import SOURCE_ALIASES, canonical
from trainer.config.dialects import understood
from trainer.config.errors import UserError, shown
from trainer.config.messages import section_wanted
from trainer.config.sections import RunConfig

SOURCES = ("dataset.mix", "dataset.evaluation")


class Given:
    """The tree that is validated, the names under which it was given, and notes on what was read differently."""

    def __init__(self, path: Path, lines: Mapping[str, int]) -> None:
        self.tree: dict[str, Any] = {}
        self.notes: list[str] = []
        self.names: dict[str, str] = {}
        """Our name -> the name that was typed."""
        self._path, self._lines = path, lines
        self._overridden: set[str] = set()
        self._left_out: dict[str, Any] = {}

    def add_file(self, tree: Mapping[Any, Any]) -> None:
        """Take in a file's settings. Raises UserError for one that is there under two names."""
        for name, value in self._entries(tree):
            self._add(name, value)

    def override(self, name: str, value: Any) -> None:
        """Use this value instead of the file's."""
        self._add(name, value, replace=True)

    def check_bits(self) -> None:
        """Raise UserError for a base that shall be and shall not be in 4 bits; note settings of one that is not."""
        adapter = self.tree.get("adapter", "lora")
        if adapter == "qlora" and self._left_out.get("load_in_4bit") is False:
            raise UserError(
                "load_in_4bit=false: adapter is qlora, whose base has 4 bits; write adapter: lora, or remove it"
            )
        section = self.tree.get("quantization")
        # Written out in full with its defaults it comes from a finished run's record.
        defaults = RunConfig.model_fields["quantization"].get_default().model_dump()
        if adapter != "qlora" and isinstance(section, dict) and section and section != defaults:
            name = f"quantization.{next(iter(section))}"
            self.notes.append(
                f"{self.names.get(name, name)} has no effect: adapter is {shown(adapter)}, and only adapter: qlora "
                "has a quantised base"
            )

    def located(self, dotted: str, message: str) -> str:
        """The message with the name that was typed, and the line of the file that it stands in."""
        typed = self.names.get(dotted, dotted)
        if typed != dotted and message.startswith(dotted):
            message = typed + message.removeprefix(dotted)
        return message + self._place(dotted)

    def located_by_name(self, message: str) -> str:
        """The same for a message that begins with our name of the setting."""
        start = re.match(r"\w+(\.\w+)*", message)
        return self.located(start.group(), message) if start else message

    def _place(self, dotted: str) -> str:
        if any(dotted == name or dotted.startswith(f"{name}.") for name in self._overridden):
            return ""
        parts = dotted.split(".")
        for length in range(len(parts), 0, -1):
            above, below = ".".join(parts[:length]), parts[length:]
            line = self._lines.get(".".join([self.names.get(above, above), *below]))
            if line is not None:
                return f" ({self._path} line {line})"
        return ""

    def _entries(self, tree: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in tree.items():
            field = RunConfig.model_fields.get(key) if isinstance(key, str) else None
            kind = field.annotation if field else None
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                if isinstance(value, dict):
                    self.tree.setdefault(key, {})
                    yield from ((f"{key}.{inner}", inner_value) for inner, inner_value in value.items())
                elif value is not None:
                    raise UserError(self.located(key, section_wanted(key, kind, value)))
                elif key == "dataset":
                    yield key, value
            elif value is not None or key != "seed":  # a section, or the seed, with nothing in it means the defaults
                yield str(key), value

    def _add(self, name: str, value: Any, *, replace: bool = False) -> None:
        try:
            meant = understood(name, value)
        except UserError as error:
            raise UserError(str(error) if replace else self.located(name, str(error))) from None
        if meant is not None:
            settings, note = meant
            self.notes.append(note)
            self._left_out[name] = value
            for dotted, stands_for in settings.items():
                self._put(dotted, stands_for, name, replace)
            return
        dotted, alias_note = canonical(name)
        self.notes += [alias_note] if alias_note else []
        self._put(dotted, self._rename_source(value) if dotted in SOURCES else value, name, replace)

    def _put(self, dotted: str, value: Any, name: str, replace: bool) -> None:
        *sections, last = dotted.split(".")
        node = self.tree
        for section in sections:
            child = node.setdefault(section, {})
            if not isinstance(child, dict):
                raise UserError(
                    f"{dotted}={shown(value)}: {section} is {shown(child)}, not a section; remove one of them"
                )
            node = child
        if replace:
            self._overridden.add(dotted)
        elif dotted in self.names and node[last] != value:
            raise UserError(
                f"{name}: given as {self.names[dotted]} as well, which is the same setting; keep one"
                + (f" ({self._path} line {self._lines[name]})" if name in self._lines else "")
            )
        self.names[dotted] = name
        node[last] = value

    def _rename_source(self, entry: Any) -> Any:
        """Our names inside one source of examples, or inside each of several."""
        if isinstance(entry, list):
            return [self._rename_source(source) for source in entry]
        if not isinstance(entry, dict):
            return entry
        others = [(name, ours) for name, ours in SOURCE_ALIASES.items() if name in entry]
        self.notes += [f"{name} of a source is read as {ours}" for name, ours in others]
        return {SOURCE_ALIASES.get(name, name): value for name, value in entry.items()}
