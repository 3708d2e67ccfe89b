"""Settings as they come in, gathered under our names: each once from the file, then from the command line."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from trainer.config.aliases import canonical
from trainer.config.dialects import understood
from trainer.config.errors import UserError, shown
from trainer.config.messages import section_wanted
from trainer.config.mistakes import Mistakes, remove_setting
from trainer.config.needs import Unread
from trainer.config.sections import RunConfig
from trainer.config.source_dialect import source_settings

SOURCES = ("dataset.mix", "dataset.evaluation")


class Given:
    """The tree that is validated, the names under which it was given, and notes on what was read differently."""

    def __init__(self, path: Path, lines: Mapping[str, int]) -> None:
        self.tree: dict[str, Any] = {}
        self.notes: list[str] = []
        self.mistakes = Mistakes(path, lines)
        self._left_out: dict[str, Any] = {}

    @property
    def names(self) -> dict[str, str]:
        """Our name -> the name that was typed."""
        return self.mistakes.names

    def add_file(self, tree: Mapping[Any, Any]) -> None:
        """Take in a file's settings; one that is there under two names is a mistake."""
        for name, value in self._entries(tree):
            self._add(name, value)

    def override(self, name: str, value: Any) -> None:
        """Use this value instead of the file's."""
        self._add(name, value, replace=True)

    def check_bits(self) -> None:
        """Note a base that is asked for in 4 bits and not in 4 bits."""
        adapter = self.tree.get("adapter", "lora")
        if adapter == "qlora" and self._left_out.get("load_in_4bit") is False:
            self.mistakes.add(
                "load_in_4bit",
                "load_in_4bit=false: adapter is qlora, whose base has 4 bits; write adapter: lora, or remove it",
            )

    def leave_out(self, unread: Mapping[str, list[Unread]]) -> None:
        """Remove settings that nothing reads, and note each reason; what another setting replaces is only noted."""
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
                    self.mistakes.add(key, section_wanted(key, kind, value))
                elif key == "dataset":
                    yield key, value
            elif value is not None or key != "seed":  # a section, or the seed, with nothing in it means the defaults
                yield str(key), value

    def _add(self, name: str, value: Any, *, replace: bool = False) -> None:
        if replace:
            self.mistakes.override(name)
        try:
            meant = understood(name, value)
        except UserError as error:
            self.mistakes.add(name, str(error))
            return
        if meant is not None:
            settings, note = meant
            self.notes.append(note)
            self._left_out[name] = value
            for dotted, stands_for in settings.items():
                self._put(dotted, stands_for, name, replace)
            return
        dotted, alias_note = canonical(name)
        self.notes += [alias_note] if alias_note else []
        self._put(dotted, self._rename_source(value, name) if dotted in SOURCES else value, name, replace)

    def _put(self, dotted: str, value: Any, name: str, replace: bool) -> None:
        *sections, last = dotted.split(".")
        node = self.tree
        for section in sections:
            child = node.setdefault(section, {})
            if not isinstance(child, dict):
                self.mistakes.add(
                    name, f"{dotted}={shown(value)}: {section} is {shown(child)}, not a section; remove one of them"
                )
                return
            node = child
        either = (node.get(last), value) in (("lora", "qlora"), ("qlora", "lora"))
        if dotted == "adapter" and either and self._has_8_bits(name):
            value = "qlora"  # which Axolotl calls lora, with load_in_8bit beside it
        elif replace:
            self.mistakes.override(dotted)
        elif dotted in self.names and node[last] != value:
            self.mistakes.add_twice(dotted, name)
            return
        self.names[dotted] = name
        node[last] = value

    def _has_8_bits(self, name: str) -> bool:
        return "load_in_8bit" in (name, self.names.get("adapter"))

    def _rename_source(self, entry: Any, name: str) -> Any:
        """Our names inside one source of examples, or inside each of several."""
        if isinstance(entry, list):
            return [self._rename_source(source, f"{name}.{index}") for index, source in enumerate(entry)]
        if not isinstance(entry, dict):
            return entry
        try:
            ours, notes = source_settings(entry)
        except UserError as error:
            self.mistakes.add(name, f"{name}.{error}")
            return entry
        self.notes += notes
        return ours
