"""Read the `adapters` setting, which trains several adapters together on one base model.

An entry contains a `name` and the settings that differ, in sections or under dotted names. `split_adapters` builds a
configuration for each adapter, as for a separate run with the output folder output_dir/NAME.
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
from trainer.config.values import set_dotted

RESUME = "resume_from_checkpoint"
PER_ADAPTER: tuple[str, ...] = tuple(RULES["settings_of_an_adapter"])
"""Settings that may differ between adapters: names, or prefixes of sections, which end in `.`."""


def find_entry_mistakes(adapters: tuple[dict[str, Any], ...]) -> Iterator[Mistake]:
    """Yield a mistake for each invalid or duplicate adapter name, and for each setting that all adapters must share."""
    names: set[str] = set()
    for index, entry in enumerate(adapters):
        name = entry.get("name")
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.=+,-]{0,99}", name):
            fix = "write `name: NAME` with letters, digits and . , _ - = + only; it also names the folder"
            fix = f'write it in quotes: "{name}"' if type(name) in (int, float) else fix
            yield Mistake(f"adapters.{index}.name", name, "must name the adapter", fix)
        elif name.lower() in names or re.fullmatch(r"logs|checkpoint-\d+", name):
            yield Mistake(
                f"adapters.{index}.name", name, "is reserved or already used", "give each adapter a different name"
            )
        names.add(str(name).lower())
        given: dict[str, Any] = {}
        for dotted, value in flatten_entry(entry):
            other = (n for n in given if f"{n}.".startswith(f"{dotted}.") or dotted.startswith(f"{n}."))
            if any(given[n] != value for n in other):
                yield Mistake(f"adapters.{index}.{dotted}", value, "given twice with different values", "keep one")
            given[dotted] = value
            is_setting = dotted != "name" and dotted.split(".")[0] in RunConfig.model_fields
            inner = [name for name in PER_ADAPTER if name.startswith(f"{dotted}.") and name != f"{dotted}."]
            if inner:
                yield Mistake(f"adapters.{index}.{dotted}", value, "must be a section", f"write `{inner[0]}: ...`")
            elif is_setting and not dotted.startswith(PER_ADAPTER):
                problem = "is shared by all adapters of a run"
                yield Mistake(f"adapters.{index}.{dotted}", value, problem, f"set {dotted} for all adapters")


def split_adapters(config: RunConfig, tree: Mapping[str, Any]) -> Iterator[Mistake]:
    """Set `config.runs` to one configuration per adapter, built from `tree`, and yield the mistakes in them."""
    yield from find_entry_mistakes(config.adapters)
    runs = []
    for index, entry in enumerate(config.adapters):
        settings = copy.deepcopy({name: value for name, value in tree.items() if name != "adapters"})
        settings["output_dir"] = str(Path(config.output_dir) / str(entry.get("name")))
        for dotted, value in flatten_entry(entry):
            set_dotted(settings, dotted, value)
        settings.pop("name", None)
        if settings.setdefault("training", {}).get(RESUME) == "latest":
            settings["training"][RESUME] = "auto"  # an added adapter starts at its first step
        try:
            runs.append(RunConfig.model_validate(settings))
        except ValidationError as error:
            for mistake in describe_errors(error):
                yield replace(mistake, setting=f"adapters.{index}.{mistake.setting}")
    config._runs = tuple(runs)
