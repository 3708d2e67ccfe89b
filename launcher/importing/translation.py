"""What becomes of another trainer's settings: taken over, different, left out or without effect, each with its line."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config import UserError
from trainer.config.errors import shown

_NOTHING: tuple[Any, ...] = (None, "", [], {})


@dataclass(frozen=True)
class Setting:
    """A setting of ours, and what it comes from."""

    value: Any
    origin: str
    """The line and name there, or whose default it is."""


@dataclass(frozen=True)
class Remark:
    """What is to be known of a setting there."""

    where: str
    text: str


class Refused(UserError):
    """A configuration that asks for something that is not offered here."""


@dataclass
class Theirs:
    """The settings of another trainer, from which each is taken once; `lines` says where they are written."""

    path: Path
    trainer: str
    tree: dict[str, Any]
    lines: Mapping[str, int]
    folder: Path
    """Where its relative paths begin."""
    taken: set[str] = field(default_factory=set)

    def take(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these names that says something; all of them count as seen."""
        self.taken.update(names)
        return next((self.tree[name] for name in names if self.tree.get(name) not in _NOTHING), default)

    def has(self, *names: str) -> str | None:
        """The first of these names that says something other than false."""
        self.taken.update(names)
        said = (name for name in names if self.tree.get(name) not in _NOTHING and self.tree[name] is not False)
        return next(said, None)

    def where(self, name: str) -> str:
        """`line 12, sequence_len`, for a comment."""
        return f"line {self.lines[name]}, {name}" if name in self.lines else name

    def refused(self, name: str, reason: str) -> Refused:
        """The one line for a setting that cannot be had here."""
        place = f"{self.path}:{self.lines[name]}: " if name in self.lines else f"{self.path}: "
        value = self.tree.get(name.partition(".")[0]) if "." not in name else None
        return Refused(f"{place}{name}{f'={shown(value, 40)}' if value is not None else ''}: {reason}")


@dataclass
class Translation:
    """Our settings by dotted name, and what there is to say about them."""

    theirs: Theirs
    settings: dict[str, Setting] = field(default_factory=dict)
    different: list[Remark] = field(default_factory=list)
    left_out: list[Remark] = field(default_factory=list)
    no_effect: list[str] = field(default_factory=list)

    def set(self, dotted: str, value: Any, name: str) -> None:
        """Take a setting over; `name` is theirs."""
        self.settings[dotted] = Setting(value, self.theirs.where(name))

    def default(self, dotted: str, value: Any) -> None:
        """Write out their default, where ours differs or may come to."""
        self.settings.setdefault(dotted, Setting(value, f"the default of {self.theirs.trainer}"))

    def copy(self, dotted: str, *names: str) -> bool:
        """Take a setting over as it stands, if it is there."""
        value = self.theirs.take(*names)
        if value is None:
            return False
        self.set(dotted, value, next(name for name in names if self.theirs.tree.get(name) not in _NOTHING))
        return True

    def copy_or(self, dotted: str, default: Any, *names: str) -> None:
        """Take a setting over as it stands, or write out their default."""
        if not self.copy(dotted, *names):
            self.default(dotted, default)

    def differs(self, name: str, text: str) -> None:
        """Say what is not as it was there."""
        self.different.append(Remark(self.theirs.where(name), text))

    def leave_out(self, name: str, text: str) -> None:
        """Say what is not offered here."""
        self.left_out.append(Remark(self.theirs.where(name), text))

    def finish(self, without_effect: Iterable[str], prefixes: tuple[str, ...]) -> None:
        """Account for everything that is left: empty, without effect here, or not offered."""
        known = set(without_effect)
        for name in self.theirs.tree:
            value = self.theirs.tree[name]
            if name not in self.theirs.taken:
                if value in _NOTHING or value is False or name in known or name.startswith(prefixes):
                    self.no_effect.append(name)
                else:
                    self.leave_out(name, f"{shown(value, 60)}: there is nothing like it here")
            elif value in _NOTHING:
                self.no_effect.append(name)

    def tree(self) -> dict[str, Any]:
        """The settings as the nested tree of a configuration."""
        whole: dict[str, Any] = {}
        for dotted, setting in self.settings.items():
            *sections, last = dotted.split(".")
            node = whole
            for section in sections:
                node = node.setdefault(section, {})
            node[last] = setting.value
        return whole
