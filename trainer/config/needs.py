"""Find settings that have no effect because of another setting, as declared in the metadata of fields."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from trainer.config.errors import Mistake, join_choices, to_text
from trainer.config.types import AUTO

HUB = "a Hub ID"


@dataclass(frozen=True)
class Needs:
    """Declares that a setting has an effect only if another setting, its switch, has one of `values`.

    Without `values`, any truthy value is enough. `switch` may list several names separated by spaces, one of which is
    enough; a leading dot stands for the field's section. If a field has several `Needs`, all must be met.
    """

    switch: str
    values: tuple[Any, ...] = ()
    replaces: bool = False
    """Whether both may be set, because the switch takes precedence."""

    def is_met(self, config: BaseModel, setting: str) -> bool:
        """Return whether the setting has an effect; true if the value of the switch is not known yet."""
        if setting in self.switch.split():
            return True
        values = [read_switch_value(config, name) for name in self.switch.split()]
        return any(value is _UNKNOWN or self._allows(value) for value in values)

    def _allows(self, value: Any) -> bool:
        if not self.values:
            return bool(value)
        elements = value if isinstance(value, tuple | dict) else ()
        return value in self.values or any(element in self.values for element in elements)

    @property
    def requires_unset_switch(self) -> bool:
        return self.values in ((None,), ((),))

    def describe_reason(self, config: BaseModel) -> str:
        """Return why the setting has no effect, as a clause that ends a sentence."""
        names = self.switch.split()
        if not self.values:
            return f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} not set"
        state = "given instead" if self.requires_unset_switch else to_text(read_switch_value(config, names[0]))
        return f"{names[0]} is {state}"

    def format_condition(self) -> str:
        names = self.switch.split()
        return f"{names[0]}: {join_choices(map(to_text, self.values))}" if self.values else " or ".join(names)


LANGUAGE = Needs("task", ("language", "preference", "reward"))


@dataclass(frozen=True)
class UnusedSetting:
    name: str
    value: Any
    is_default: bool
    unmet: Needs


_UNKNOWN = object()
"""Value of a switch that does not exist or is decided later."""


def find_unused_settings(config: BaseModel) -> Iterator[UnusedSetting]:
    """Yield every setting that has a value (not false, 0, empty or none) but no effect."""
    by_run = [list(_find_unused_in_section(run, run, "", ())) for run in getattr(config, "runs", ()) or (config,)]
    in_all = set.intersection(*({unused.name for unused in settings} for settings in by_run))
    yield from (unused for unused in by_run[0] if unused.name in in_all)


def find_other_task_settings(config: Any, task: str) -> Iterator[UnusedSetting]:
    """Yield the non-default settings that only tasks other than `task` use."""
    for setting in find_unused_settings(config.model_copy(update={"task": task})):
        if setting.unmet.switch == "task" and not setting.is_default:
            yield setting


def build_unused_settings_mistake(settings: Sequence[UnusedSetting], reason: str) -> Mistake:
    """Return one mistake for all settings that the same switch disables."""
    first, others = settings[0], [setting.name.rpartition(".")[2] for setting in settings[1:]]
    also = f" (like {', '.join(others)})" if others else ""
    unmet = first.unmet
    fix = f"remove {unmet.switch}" if unmet.requires_unset_switch else f"set {unmet.format_condition()}"
    involves = " ".join([*(setting.name for setting in settings[1:]), unmet.switch])
    problem = f"has no effect{also}, because {reason}"
    return Mistake(first.name, first.value, problem, f"{fix}, or remove {'them' if others else 'it'}", involves)


def list_needs(section: type[BaseModel], name: str, prefix: str = "") -> tuple[Needs, ...]:
    """Return the `Needs` of a field, with `prefix` in place of leading dots."""
    declared = [need for need in section.model_fields[name].metadata if isinstance(need, Needs)]
    return tuple(replace(need, switch=re.sub(r"(^| )\.", rf"\1{prefix}", need.switch)) for need in declared)


def read_switch_value(config: Any, name: str) -> Any:
    """Return a setting's value, HUB for a model or dataset that is not on this machine, or _UNKNOWN."""
    value = config
    for part in name.split("."):
        value = value[int(part)] if part.isdigit() else getattr(value, part, _UNKNOWN)
    if value in ("auto", AUTO):
        return _UNKNOWN
    is_source = isinstance(value, str) and name.endswith(("path", "base_model", "tokenizer"))
    if is_source and not value.startswith("random:") and not os.path.exists(os.path.expanduser(value)):
        return HUB
    return value


def _find_unused_in_section(
    config: BaseModel, section: BaseModel, prefix: str, inherited: tuple[Needs, ...]
) -> Iterator[UnusedSetting]:
    # The defaults have `auto` resolved. At the top level only sections have needs; required fields have no defaults.
    has_defaults = prefix and not any(field.is_required() for field in type(section).model_fields.values())
    defaults = dict(type(section)()) if has_defaults else {}
    for name, value in section:
        dotted = prefix + name
        needs = inherited + list_needs(type(section), name, prefix)
        if isinstance(value, BaseModel):
            yield from _find_unused_in_section(config, value, f"{dotted}.", needs)
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for index, entry in enumerate(value):
                yield from _find_unused_in_section(config, entry, f"{dotted}.{index}.", needs)
        elif value and (failed := next((need for need in needs if not need.is_met(config, dotted)), None)):
            yield UnusedSetting(dotted, value, value == defaults.get(name), failed)
