"""Recognize other trainers' files, and translate those of their settings that depend on the value."""

from collections.abc import Mapping
from typing import Any

from trainer.config.aliases import ALIASES, ELSEWHERE, OTHER_TRAINERS, split_names
from trainer.config.errors import UserError, shown
from trainer.config.sections import RunConfig

PREFERENCES = "online methods (PPO, GRPO) are not offered here"
MEANINGS: dict[str, dict[Any, dict[str, Any]]] = split_names(OTHER_TRAINERS["meanings"])
"""Names -> value -> equivalent settings here. ELSEWHERE has the advice for all other values."""
_PREFERENCE_STAGES = ("ppo", "grpo", "gdpo", "reward")


def translate_setting(name: str, value: Any) -> tuple[dict[str, Any], str] | None:
    """Return the settings equivalent to another trainer's setting, and a note; None if `name` is not one of them.

    Raises UserError, with what to write instead, for a value without an equivalent.
    """
    if name not in ELSEWHERE:
        return ({}, f"{name}: empty, ignored") if value is None and name in ALIASES else None
    if value is None or value in ([], {}, ""):
        return {}, f"{name}: empty, ignored"
    written = f"{name}: {shown(value)}"
    word = value.strip().lower() if isinstance(value, str) else value
    for known, settings in MEANINGS.get(name, {}).items():
        # True equals 1 in Python, but they are different values here.
        if (type(known), known) == (type(word), word):
            if not settings:
                return {}, f"{written} has no effect here and is ignored"
            means = ", ".join(f"{ours}: {shown(ours_value)}" for ours, ours_value in settings.items())
            return settings, f"{written} is read as {means}"
    if name in ("rl", "stage") and word in _PREFERENCE_STAGES:
        raise UserError(f"{name}={shown(value)}: {PREFERENCES}")
    raise UserError(f"{name}={shown(value)}: not a setting here; {ELSEWHERE[name]}")


TRAINER_NAMES = {trainer: set(names.split()) for trainer, names in OTHER_TRAINERS["recognized_by"].items()}
"""Names that only one trainer has."""
ENOUGH = 2


def recognize_trainer(tree: Mapping[Any, Any], *, enough: int = ENOUGH) -> str | None:
    """Return the trainer that a file was written for; None for our files, which may have a few names of others.

    A file is theirs if it has at least `enough` of their names, and more than twice as many as sections of ours.
    """
    names = {str(name) for name in tree}
    counts = {trainer: len(names & known) for trainer, known in TRAINER_NAMES.items()}
    best = max(counts, key=lambda trainer: counts[trainer])
    ours = len(names & set(RunConfig.model_fields) - {"base_model", "adapter", "output_dir", "seed"})
    # LLaMA-Factory also has a `dataset`, which is not a section.
    ours -= isinstance(tree.get("dataset"), str)
    return best if counts[best] >= enough and counts[best] > 2 * ours else None
