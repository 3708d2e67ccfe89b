"""Names of settings in Axolotl, LLaMA-Factory, TRL and the Hugging Face Trainer, and their equivalents here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config.yaml_core import read_table

OTHER_TRAINERS: dict[str, dict[str, Any]] = read_table(Path(__file__).with_name("other_trainers.yaml"))


def split_names(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for each of several names that share one."""
    return {name: row for names, row in rows.items() for name in names.split()}


ALIASES: dict[str, str] = {name: ours for ours, names in OTHER_TRAINERS["aliases"].items() for name in names.split()}
ELSEWHERE: dict[str, str] = split_names(OTHER_TRAINERS["advice"])
"""Settings of other trainers that have another form here -> what to write instead."""
