"""Checks of a run without importing torch (a contract of import-linter), before ranks do."""

from pathlib import Path

from trainer.checkpoint.checkpoint_files import choose_checkpoint
from trainer.checkpoint.output_folder import check_free, check_place
from trainer.config import RunConfig, SourceSection
from trainer.config.evaluation_section import check_task_names
from trainer.data.source_files import read_template
from trainer.data.sources import local_path
from trainer.model.model_source import check_source
from trainer.model.published_shapes import is_random


def check_early(config: RunConfig, *, to_train: bool = True) -> None:
    """Raise UserError if the output folder cannot be used, or a model, template or data do not exist.

    With `to_train=False` the output folder may already contain a run, or no checkpoint to resume.
    """
    check_place(config)
    for run in config.runs:
        check_early(run, to_train=to_train)
    if config.runs:
        return
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
