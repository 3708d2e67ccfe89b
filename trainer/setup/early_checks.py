"""Checks of a run without importing torch (a contract of import-linter), before commands do."""

from collections.abc import Sequence
from pathlib import Path

from trainer.checkpoint.output_folder import check_free, check_place
from trainer.checkpoint.run_record import find_run_dir
from trainer.config import RunConfig, load_config
from trainer.data.sources import local_path
from trainer.model.model_source import check_source
from trainer.model.published_shapes import is_random

OF_CONFIG = ("inspect", "prepare")
OF_RUN = ("eval", "generate", "chat", "merge", "export", "push")


def check_words(command: str, words: Sequence[str]) -> None:
    """Raise the UserError of a command if its run, configuration, model or data does not exist."""
    first = words[0] if words else "-"
    if command in OF_RUN and not first.startswith("-"):
        find_run_dir(Path(first))
    if command in OF_CONFIG and first.endswith((".yaml", ".yml")):
        overrides = [word for word in words[1:] if "=" in word and not word.startswith("-")]
        check_early(load_config(Path(first), overrides).config, to_train=command == "prepare")


def check_early(config: RunConfig, *, to_train: bool = True) -> None:
    """Raise UserError if the output folder cannot be used, or the base model or data do not exist.

    With `to_train=False` the output folder may already contain a run.
    """
    check_place(config)
    if to_train:
        check_free(config)
    if not is_random(config.base_model) and not Path(config.base_model).exists():
        check_source("base_model", config.base_model)
    data = config.dataset
    sources = [(f"dataset.mix.{at}", source) for at, source in enumerate(data.mix)] or [("dataset", data)]
    for label, source in [*sources, ("dataset.evaluation", data.evaluation)]:
        if source is not None and source.path is not None:
            local_path(source, label)
