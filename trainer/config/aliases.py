"""Names of settings in Axolotl, LLaMA-Factory, TRL and the Hugging Face Trainer, and our equivalents."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def read_table(path: Path) -> Any:
    """Return the content of a YAML file of this package."""
    # Every command reads some of them: libyaml takes 4 ms for 200 lines, pure PyYAML 17 ms.
    return yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


OTHER_TRAINERS: dict[str, dict[str, Any]] = read_table(Path(__file__).with_name("other_trainers.yaml"))


def split_names(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Split keys that list several names: {'a b': row} becomes {'a': row, 'b': row}."""
    return {name: row for names, row in rows.items() for name in names.split()}


ALIASES: dict[str, str] = {name: ours for ours, names in OTHER_TRAINERS["aliases"].items() for name in names.split()}
ADVICE: dict[str, str] = split_names(OTHER_TRAINERS["advice"])
"""Settings of other trainers without an equal setting here -> what to write instead."""
