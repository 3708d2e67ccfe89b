"""Map setting names from Axolotl, LLaMA-Factory, TRL and the Hugging Face Trainer to ours."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def read_table(path: Path) -> Any:
    # Every command reads some of these files: libyaml parses 200 lines in 4 ms, pure PyYAML in 17 ms.
    return yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


OTHER_TRAINERS: dict[str, dict[str, Any]] = read_table(Path(__file__).with_name("other_trainers.yaml"))


def split_names(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Split keys that list several names: {'a b': row} becomes {'a': row, 'b': row}."""
    return {name: row for names, row in rows.items() for name in names.split()}


ALIASES: dict[str, str] = {name: key for key, names in OTHER_TRAINERS["aliases"].items() for name in names.split()}
REPLACEMENT_ADVICE: dict[str, str] = split_names(OTHER_TRAINERS["advice"])
"""Advice on what to write instead of settings from other trainers that have no equivalent here."""
