"""`zerolora import`: read, recognise, translate, check, write."""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from launcher.importing.translation import Foreign, Translation
from launcher.importing.writing import format_yaml
from launcher.supervision.terminal import say
from trainer.config.dialects import recognize_trainer
from trainer.config.errors import UserError, UserErrors
from trainer.config.load import load_text
from trainer.config.needs import find_unread_settings
from trainer.config.sections import RunConfig
from trainer.config.yaml_core import Yaml11Loader, parse_yaml, read_yaml
from trainer.contract.output_files import check_output_file
from trainer.contract.whole_files import write_whole

TRANSLATORS = {"Axolotl": "axolotl", "LLaMA-Factory": "llamafactory", "TRL": "trl"}
"""Module of each trainer; their tables are only read when one is imported."""


def import_(
    context: typer.Context,
    source: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE | ARGUMENTS", help="A file of Axolotl or LLaMA-Factory, or TRL's command line."),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The file to write; default: print it.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    dataset_dir: Annotated[Path | None, typer.Option(help="The folder of LLaMA-Factory's dataset_info.json.")] = None,
) -> None:
    """Translate a configuration of Axolotl or LLaMA-Factory, or TRL's command line, into one of zerolora's."""
    arguments = [*(source or []), *context.args]
    if not arguments:
        raise UserError("zerolora import: nothing to import; pass a file, or the command line after `--`")
    target = None if output is None else Path(os.path.realpath(output))
    if target is not None:
        check_output_file(target, f"--output {output}")
        if target.exists() and not force:
            raise UserError(f"--output {output}: already exists; use another file, or add --force")
    translation = translate_arguments(arguments, dataset_dir)
    text = format_yaml(translation, str(output or "mine.yaml"))
    if target is None:
        typer.echo(text, nl=False)
        return
    sources = [{"path": translation.get_setting("dataset.path")}, *(translation.get_setting("dataset.mix") or [])]
    read = [*translation.foreign.files, *(source["path"] for source in sources if source.get("path"))]
    if target in (Path(os.path.realpath(file)) for file in read):
        raise UserError(f"--output {output}: is a file that is imported, or its data; use another file")
    write_whole(target, text)
    kept, other = len(translation.settings), len(translation.different) + len(translation.left_out)
    say(f"{output}: {kept} settings; {other} remarks at its top. Next: zerolora validate {output}")


def translate_arguments(arguments: Sequence[str], dataset_dir: Path | None = None) -> Translation:
    """Return the translation of a file or a command line. Raises UserErrors for everything that cannot be imported."""
    if len(arguments) > 1 or arguments[0].startswith("--"):
        foreign = importlib.import_module("launcher.importing.trl").read_command_line(arguments, Path.cwd())
    else:
        foreign = read_foreign(Path(arguments[0]), dataset_dir)
    module = importlib.import_module(f"launcher.importing.{TRANSLATORS[foreign.trainer]}")
    translation: Translation = module.translate(foreign)
    translation.finish()
    leave_out_unread(translation)
    try:
        load_text(Path("mine.yaml"), format_yaml(translation, ""), with_lines=False)
    except UserErrors as errors:
        for mistake in errors.mistakes:
            translation.report_config_error(mistake)
    translation.check()
    return translation


def leave_out_unread(translation: Translation) -> None:
    """Turn settings without effect into remarks; other trainers accept options of disabled features."""
    try:
        config = RunConfig.model_validate(parse_yaml(Path("mine.yaml"), format_yaml(translation, "")).tree)
    except ValidationError:  # reported by load_text
        return
    for found in find_unread_settings(config):
        if found.name in translation.settings and not found.need.replaces:
            names = translation.settings.pop(found.name).names
            for name in names[:1]:  # empty for their defaults
                translation.leave_out(name, f"{found.name} would have no effect, because {found.need.reason(config)}")


def read_foreign(path: Path, dataset_dir: Path | None) -> Foreign:
    """Read a file of another trainer as that trainer would. Raises UserError for any other file."""
    file = read_yaml(path, Yaml11Loader)
    tree = {str(name): value for name, value in file.tree.items()}
    if dataset_dir is not None:
        tree["dataset_dir"] = str(dataset_dir.absolute())
    trainer = recognize_trainer(tree, enough=1)
    if trainer is None:
        raise UserError(
            f"{path}: not a configuration of {', '.join(TRANSLATORS)}; for one of zerolora's, run `zerolora train`"
        )
    if trainer not in TRANSLATORS:
        raise UserError(f"{path}: a file of {trainer}'s; import the command that names it: accelerate launch ...")
    if trainer == "LLaMA-Factory" and file.mistakes:  # which it refuses to read
        raise UserErrors([f"{path}:{line}: {problem}" for line, problem in file.mistakes])
    return Foreign(trainer, str(path), tree, path.absolute().parent, path, file.lines, files=[path])
