"""Several adapters of one run: each is a run of its own in all settings, and shares the base and the passes.

An entry of `adapters` has a `name` and the settings that differ, in sections or with dots. `split_adapters` builds the
configuration of each adapter, as if it were trained alone into a folder of that name below output_dir.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.config.checks import RULES, flatten_entry
from trainer.config.errors import Mistake
from trainer.config.messages import describe_errors
from trainer.config.sections import RunConfig

RESUME = "resume_from_checkpoint"
OWN: tuple[str, ...] = tuple(RULES["settings_of_an_adapter"])
"""Settings that may differ between adapters: names, or sections that end in `.`."""


def find_entry_mistakes(adapters: tuple[dict[str, Any], ...]) -> Iterator[Mistake]:
    """Yield a mistake for each name that is no folder or used twice, and each setting that all adapters share."""
    names: set[str] = set()
    for index, entry in enumerate(adapters):
        name = entry.get("name")
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.=+,-]{0,99}", name):
            fix = "write `name: ...` with letters, digits and . , _ - = +, the name of its folder"
            yield Mistake(f"adapters.{index}.name", name, "must name the adapter", fix)
        elif name.lower() in names or re.fullmatch(r"logs|checkpoint-\d+", name):
            yield Mistake(f"adapters.{index}.name", name, "is used already", "give each adapter a name of its own")
        names.add(str(name).lower())
        for dotted, value in flatten_entry(entry):
            if inner := next((name for name in OWN if name.startswith(f"{dotted}.") and name != f"{dotted}."), None):
                yield Mistake(f"adapters.{index}.{dotted}", value, "must be a section", f"write `{inner}: ...`")
            elif dotted != "name" and not dotted.startswith(OWN) and dotted.split(".")[0] in RunConfig.model_fields:
                problem = "is shared by all adapters of a run"
                yield Mistake(f"adapters.{index}.{dotted}", value, problem, f"set {dotted} for the whole run")


def split_adapters(config: RunConfig, tree: Mapping[str, Any]) -> Iterator[Mistake]:
    """Give `config` the configurations of its adapters, built from the settings in `tree`; yield their mistakes."""
    yield from find_entry_mistakes(config.adapters)
    runs = []
    for index, entry in enumerate(config.adapters):
        own = copy.deepcopy({name: value for name, value in tree.items() if name != "adapters"})
        own["output_dir"] = str(Path(config.output_dir) / str(entry.get("name")))
        for dotted, value in flatten_entry(entry):
            _put(own, dotted, value)
        own.pop("name", None)
        if own.setdefault("training", {}).get(RESUME) == "latest":
            own["training"][RESUME] = "auto"  # an adapter that was added begins at its first step
        try:
            runs.append(RunConfig.model_validate(own))
        except ValidationError as error:
            for mistake in describe_errors(error):
                yield replace(mistake, setting=f"adapters.{index}.{mistake.setting}")
    config._runs = tuple(runs)


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, last = dotted.split(".")
    for section in sections:
        inner = tree.setdefault(section, {})
        if not isinstance(inner, dict):
            inner = tree[section] = {}
        tree = inner
    tree[last] = value
