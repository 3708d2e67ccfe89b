"""`zerolora import`: read a configuration, recognize its trainer, translate it, check it, and write it."""

import importlib
import math
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel, ValidationError

from launcher.importing.translation import ForeignConfig, Translation
from launcher.supervision.terminal import log
from trainer.config.errors import UserError, UserErrors, format_count
from trainer.config.load import load_config_text, recognize_trainer
from trainer.config.needs import find_unused_settings
from trainer.config.sections import RunConfig
from trainer.config.yaml_core import Yaml11Loader, dump, parse_yaml, read_yaml
from trainer.contract.output_files import check_settings_file
from trainer.contract.whole_files import write_text_atomic

TRANSLATORS = {"Axolotl": "axolotl", "LLaMA-Factory": "llamafactory", "TRL": "trl"}
"""Trainer -> module, which is imported only when needed, because it reads a table."""


def import_(
    context: typer.Context,
    source: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE|ARGUMENTS", help="A file of Axolotl or LLaMA-Factory, or TRL's command line."),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The file to write; default: print it.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    dataset_dir: Annotated[Path | None, typer.Option(help="Folder of LLaMA-Factory's dataset_info.json.")] = None,
) -> None:
    """Convert an Axolotl or LLaMA-Factory configuration, or a TRL command line, to a zerolora configuration."""
    arguments = [*(source or []), *context.args]
    if not arguments:
        raise UserError("zerolora import: no configuration; pass a file, or a command line after `--`")
    target = None if output is None else Path(os.path.realpath(output))
    if output is not None and output.exists() and not os.path.exists(target or output):
        target = output  # such as /dev/stdout, which leads to a pipe without a path
    if target is not None:
        check_settings_file(target, f"--output {output}", force=force)
    translation = translate_arguments(arguments, dataset_dir)
    text = format_yaml(translation, str(output or "mine.yaml"))
    if target is None:
        typer.echo(text, nl=False)
        return
    write_text_atomic(target, text)
    count, notes = len(translation.settings), len(translation.different) + len(translation.left_out)
    written = f"{format_count(count, 'setting')} to {output}, with {format_count(notes, 'note')} at the top of the file"
    log(f"wrote {written}. Next: zerolora validate {output}")


def translate_arguments(arguments: Sequence[str], dataset_dir: Path | None = None) -> Translation:
    """Translate another trainer's config file or command line. Raises UserErrors for all that cannot be imported."""
    if len(arguments) > 1 and arguments[0].endswith((".yaml", ".yml", ".json")):
        raise UserError(f"{arguments[1]}: not an option of zerolora import; pass only {arguments[0]}")
    if len(arguments) > 1 or arguments[0].startswith("--") or arguments[0] == "trl":
        foreign = importlib.import_module("launcher.importing.trl").parse_command_line(arguments, Path.cwd())
    else:
        foreign = read_foreign_config(Path(arguments[0]), dataset_dir)
    module = importlib.import_module(f"launcher.importing.{TRANSLATORS[foreign.trainer]}")
    translation: Translation = module.translate(foreign)
    translation.finish()
    drop_unused_settings(translation)
    try:
        load_config_text(Path("mine.yaml"), format_yaml(translation, ""), with_lines=False)
    except UserErrors as errors:
        for mistake in errors.mistakes:
            translation.report_config_error(mistake)
    translation.check()
    return translation


def drop_unused_settings(translation: Translation) -> None:
    """Replace each setting without effect by a remark, as other trainers accept options of disabled features."""
    try:
        config = RunConfig.model_validate(parse_yaml(Path("mine.yaml"), format_yaml(translation, "")).tree)
    except ValidationError:  # load_config_text reports it
        return
    for unused in find_unused_settings(config):
        if unused.name in translation.settings and not unused.unmet.replaces:
            for name in translation.settings.pop(unused.name).names[:1]:  # a default has no names
                translation.note_unsupported(
                    name, f"{unused.name} would have no effect, because {unused.unmet.describe_reason(config)}"
                )


def read_foreign_config(path: Path, dataset_dir: Path | None) -> ForeignConfig:
    """Read another trainer's configuration (YAML 1.1), and detect the trainer. Raises UserError for other files."""
    file = read_yaml(path, Yaml11Loader)
    tree = {str(name): value for name, value in file.tree.items()}
    if dataset_dir is not None:
        tree["dataset_dir"] = str(dataset_dir.absolute())
        if not dataset_dir.is_dir():
            raise UserError(f"--dataset-dir {dataset_dir}: no such folder; pass the folder with dataset_info.json")
    trainer = recognize_trainer(tree, min_names=1)
    if dataset_dir is not None and trainer == "Axolotl":
        raise UserError(f"--dataset-dir {dataset_dir}: not supported for Axolotl; remove the option")
    if trainer is None:
        problem = f"not a configuration file for {', '.join(TRANSLATORS)}"
        raise UserError(f"{path}: {problem}; to use a zerolora configuration, run `zerolora train`")
    if trainer not in TRANSLATORS:
        fix = "import the command line that uses it, such as accelerate launch ..."
        raise UserError(f"{path}: configuration for {trainer}; {fix}")
    if trainer == "LLaMA-Factory" and file.mistakes:  # LLaMA-Factory cannot read it either
        raise UserErrors([f"{path}:{line}: {problem}" for line, problem in file.mistakes])
    return ForeignConfig(trainer, str(path), tree, path.absolute().parent, path, file.lines)


WIDTH = 118
COLUMN = 56


def format_yaml(translation: Translation, name: str) -> str:
    foreign = translation.foreign
    lines = ["#", *_wrap_comment("# ", f"Imported from {foreign.label}, written for {foreign.trainer}.", "#   ")]
    lines += _format_remarks(foreign, "Differences:", translation.different)
    lines += _format_remarks(foreign, "Not supported, and left out:", translation.left_out)
    if translation.no_effect:
        names = ", ".join(sorted(dict.fromkeys(translation.no_effect)))
        lines += ["#", *_wrap_comment("# ", f"Without effect here: {names}.", "#   ")]
    lines += ["", *_format_section(translation, RunConfig, "", "")]
    return "\n".join([f"# zerolora train {_escape(name)}", *lines]) + "\n"


def _format_remarks(foreign: ForeignConfig, head: str, remarks: list[tuple[str, str]]) -> list[str]:
    lines = ["#", f"# {head}"] if remarks else []
    for name, text in dict.fromkeys(remarks):
        lines += _wrap_comment("#   ", f"{_describe_origin(foreign, (name,))}: {text}", "#     ")
    return lines


def _describe_origin(foreign: ForeignConfig, names: tuple[str, ...]) -> str:
    line = foreign.find_line(names[0])
    return f"line {line}, {', '.join(names)}" if line else ", ".join(names)


def _wrap_comment(first: str, text: str, continuation: str) -> list[str]:
    return textwrap.wrap(
        _escape(text), WIDTH, initial_indent=first, subsequent_indent=continuation, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


def _escape(text: str) -> str:
    """Escape non-printable characters: a newline in a file name or key would end the comment."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def _format_section(translation: Translation, section: type[BaseModel], prefix: str, indent: str) -> list[str]:
    lines: list[str] = []
    inner: list[str] = []
    for name, field in section.model_fields.items():
        dotted = f"{prefix}{name}"
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            below = _format_section(translation, kind, f"{dotted}.", f"{indent}  ")
            inner += [f"{indent}{name}:", *below] if below else []
        elif (setting := translation.settings.get(dotted)) is not None:
            is_inline = None if isinstance(setting.value, (dict, list, tuple)) else False
            text = dump({name: setting.value}, default_flow_style=is_inline, width=math.inf)
            first, *rest = textwrap.indent(text, indent).split("\n")[:-1]
            foreign, names = translation.foreign, setting.names
            origin = _describe_origin(foreign, names) if names else f"the default of {foreign.trainer}"
            lines += [f"{first:<{COLUMN}}  # {_escape(origin)}", *rest]
    return lines + inner
