"""Load a RunConfig from a YAML file and key=value overrides, or report every mistake."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.config.adapter_entries import split_adapters
from trainer.config.aliases import OTHER_TRAINERS
from trainer.config.checks import describe_unusual_settings
from trainer.config.command_line import parse_override
from trainer.config.errors import UserError, UserErrors
from trainer.config.mistakes import UserSettings, replace_invalid_settings
from trainer.config.paths import get_local_path, is_remote
from trainer.config.sections import RunConfig
from trainer.config.yaml_core import dump, parse_yaml, read_config_text

OTHER_FILES = {"model_type": "a model's", "peft_type": "an adapter's", "zero_optimization": "DeepSpeed's"}
"""Names that only other kinds of configuration contain, and what each kind is."""
DEFAULT_OUTPUT = Path("runs")


@dataclass(frozen=True)
class LoadedConfig:
    """A valid configuration, with warnings and notes on translated settings."""

    config: RunConfig
    notes: tuple[str, ...]


def load_config(
    path: str | Path, overrides: list[str] | tuple[str, ...] = (), *, with_lines: bool = True
) -> LoadedConfig:
    """Read a YAML file, apply `key.sub=value` overrides, and validate the result.

    `with_lines=False`, for generated files, omits line numbers from messages.

    Raises UserErrors with a message for every mistake: the setting, its value, the fix and the line in the file.
    """
    return load_config_text(Path(path), read_config_text(Path(path)), overrides, with_lines=with_lines)


def load_config_text(
    path: Path, text: str, overrides: list[str] | tuple[str, ...] = (), *, with_lines: bool = True
) -> LoadedConfig:
    """Load a configuration from `text`, the content of the file `path`; see `load_config`."""
    file = parse_yaml(path, text)
    settings = UserSettings(path, file.lines if with_lines else {}, file.texts)
    mistakes, tree, notes = settings.mistakes, settings.tree, settings.notes
    for line, message in file.mistakes:
        mistakes.add_line_error(line, message)
    settings.add_file(file.tree)
    for before, override in pairwise(("a=", *overrides)):
        if "=" not in before + override or "=" in (before, override):  # part of `lora.r = 8`, which has been reported
            continue
        try:
            name, value = parse_override(override)
        except UserError as error:
            mistakes.add_override_error(override, str(error))
        else:
            texts = {typed: text for typed, text in mistakes.texts.items() if not typed.startswith(f"{name}.")}
            mistakes.texts = texts | {name: override.partition("=")[2].strip()}
            settings.add(name, value, override=True)
    if "output_dir" not in tree:
        tree["output_dir"] = str(DEFAULT_OUTPUT / path.stem)
        notes.append(f"output_dir is not set; using {tree['output_dir']}, named after the file")
    elif is_remote(url := str(tree["output_dir"])):
        notes.append(f"output_dir={url}: written to {get_local_path(url)}, and uploaded with every checkpoint")
    if tree.get("adapters"):
        tree.setdefault("dataset", {})  # each adapter may have its own dataset
    config: RunConfig | None
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        mistakes.add_validation_errors(error)
        config = replace_invalid_settings(tree, error)
    if config is not None and config.adapters:
        for mistake in split_adapters(config, tree):
            mistakes.add(mistake)
    unused = {} if config is None else mistakes.add_invalid_combinations(config)
    if with_lines and mistakes.count_in_file() and (trainer := recognize_trainer(file.tree)):
        raise UserError(
            f"{path}: configuration for {trainer} (unsupported settings: {mistakes.count_in_file()}); "
            f"translate it with: zerolora import {path} -o mine.yaml"
        )
    if mistakes.count_in_file() and "base_model" not in file.tree and (kinds := OTHER_FILES.keys() & file.tree):
        raise UserError(f"{path}: is {OTHER_FILES[min(kinds)]} configuration, not a run's; pass the run's YAML file")
    if entries := mistakes.list_sorted():
        raise UserErrors(entries)
    if unused:
        settings.remove_unused(unused)
        config = RunConfig.model_validate(tree)
        list(split_adapters(config, tree))
    assert config is not None, "pydantic rejected it without an error"
    return LoadedConfig(config, (*notes, *describe_unusual_settings(config)))


def recognize_trainer(tree: Mapping[Any, Any], *, min_names: int = 2) -> str | None:
    """Return the trainer that a configuration file was written for; None for zerolora's own files.

    The file must contain at least `min_names` names from that trainer, and more than twice as many as names of
    zerolora's sections.
    """
    names = {str(name) for name in tree}
    counts = {trainer: len(names & {*known.split()}) for trainer, known in OTHER_TRAINERS["recognized_by"].items()}
    best = max(counts, key=lambda trainer: counts[trainer])
    own_count = len(names & set(RunConfig.model_fields) - {"base_model", "adapter", "output_dir", "seed"})
    # LLaMA-Factory also has `dataset` and `model`, but as strings.
    own_count -= sum(isinstance(tree.get(name), str) for name in ("dataset", "model"))
    return best if counts[best] >= min_names and counts[best] > 2 * own_count else None


def dump_yaml(config: RunConfig) -> str:
    return dump(config.model_dump(mode="json"))
