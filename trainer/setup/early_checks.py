"""Checks of a run without importing torch (a contract of import-linter), before commands do."""

from collections.abc import Sequence
from pathlib import Path

from trainer.checkpoint.checkpoint_files import choose_checkpoint
from trainer.checkpoint.output_folder import check_free, check_place
from trainer.checkpoint.run_record import find_run_dir
from trainer.config import RunConfig, SourceSection, load_config
from trainer.data.source_files import build_source, read_template
from trainer.data.sources import local_path
from trainer.model.model_source import check_source
from trainer.model.published_shapes import is_random
from trainer.tasks.task_names import check_task_names

OF_CONFIG = ("inspect", "prepare")
OF_RUN = ("eval", "generate", "chat", "merge", "export", "serve", "push")
FILES = ("--data", "--prompts")
"""Options of these commands that name a file, a folder or a data set on the hub."""


def check_words(command: str, words: Sequence[str]) -> None:
    """Raise the UserError of a command if its run, configuration, model or data does not exist."""
    first = words[0] if words else "-"
    if command in OF_RUN and not first.startswith("-"):
        find_run_dir(Path(first))
        for option in FILES:
            if path := _find_value(words, option):
                local_path(build_source(path, option), option)
        if command == "eval" and (tasks := _find_value(words, "--tasks")):
            check_task_names([name.strip() for name in tasks.split(",") if name.strip()], "--tasks")
    if command in OF_CONFIG and first.endswith((".yaml", ".yml")):
        overrides = [word for word in words[1:] if "=" in word and not word.startswith("-")]
        check_early(load_config(Path(first), overrides).config, to_train=command == "prepare")


def check_early(config: RunConfig, *, to_train: bool = True) -> None:
    """Raise UserError if the output folder cannot be used, or a model, template or data do not exist.

    With `to_train=False` the output folder may already contain a run, or no checkpoint to resume.
    """
    check_place(config)
    if to_train:
        choose_checkpoint(config.training.resume_from_checkpoint, Path(config.output_dir), read=False)
        check_free(config)
    names = {"model.tokenizer": config.model.tokenizer, "lora.adapter_path": config.lora.adapter_path}
    for setting, name in ({"base_model": config.base_model} | names).items():
        if name and not is_random(name) and not Path(name).exists():
            check_source(setting, name)
    if config.dataset.chat_template is not None:
        read_template(config.dataset.chat_template)
    if config.scu.reference is not None:
        local_path(SourceSection(path=config.scu.reference), "scu.reference")
    check_task_names(config.evaluation.tasks)
    data = config.dataset
    sources = [(f"dataset.mix.{at}", source) for at, source in enumerate(data.mix)] or [("dataset", data)]
    for label, source in [*sources, ("dataset.evaluation", data.evaluation)]:
        if source is not None and source.path is not None:
            local_path(source, label)


def _find_value(words: Sequence[str], option: str) -> str | None:
    """Return the value of `--option value` or `--option=value`; None if it is not given."""
    for word, following in zip(words, [*words[1:], None], strict=True):
        if word == option or word.startswith(f"{option}="):
            return following if word == option else word.partition("=")[2]
    return None
