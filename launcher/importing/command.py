"""`zerolora import`: read, recognise, translate, check, write."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from launcher.importing import axolotl, llamafactory, trl
from launcher.importing.translation import Refused, Remark, Theirs, Translation
from launcher.importing.writing import as_yaml
from launcher.supervision.terminal import say
from trainer.config import RunConfig, UserError, load_config
from trainer.config.foreign import written_for
from trainer.config.needs import unread_settings
from trainer.config.yaml_core import read_yaml, yaml_of
from trainer.contract.output_file import check_output_file
from trainer.contract.whole_files import write_whole

TRANSLATORS: dict[str, Callable[[Theirs], Translation]] = {
    "Axolotl": axolotl.translate,
    "LLaMA-Factory": llamafactory.translate,
    "TRL": trl.translate,
}
SCRATCH = ".zerolora-import"


def import_(
    context: typer.Context,
    source: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE | ARGUMENTS", help="A file of Axolotl or LLaMA-Factory, or TRL's command line."),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The file to write; default: to print.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    dataset_dir: Annotated[Path | None, typer.Option(help="The folder of LLaMA-Factory's dataset_info.json.")] = None,
) -> None:
    """Translate a configuration of Axolotl or LLaMA-Factory, or TRL's command line, into one of zerolora's."""
    typed = [*(source or []), *context.args]
    if not typed:
        raise UserError("zerolora import: nothing to import; name a file, or write the command line behind `--`")
    if output is not None:
        check_output_file(output, f"--output {output}")
        if output.exists() and not force:
            raise UserError(f"--output {output}: is there already; name another file, or add --force")
    translation = translate_words(typed, dataset_dir)
    leave_out_unread(translation)
    text = as_yaml(translation, str(output or "mine.yaml"))
    checked(translation, text)
    if output is None:
        typer.echo(text, nl=False)
        return
    write_whole(output, text)
    kept, other = len(translation.settings), len(translation.different) + len(translation.left_out)
    say(f"{output}: {kept} settings; {other} remarks at its top. Next: zerolora validate {output}")


def translate_words(typed: Sequence[str], dataset_dir: Path | None = None) -> Translation:
    """A file's translation, or that of a command line. Raises UserError for what cannot be imported."""
    if len(typed) > 1 or typed[0].startswith("--"):
        theirs = trl.from_words(typed, Path.cwd())
        return trl.translate(theirs)
    path = Path(typed[0])
    file = read_yaml(path)
    if dataset_dir is not None:
        file.tree["dataset_dir"] = str(dataset_dir.absolute())
    trainer = written_for(file.tree)
    if trainer is None:
        raise UserError(f"{path}: written for none of {', '.join(TRANSLATORS)}; zerolora train takes it as it is")
    if trainer not in TRANSLATORS:
        raise UserError(f"{path}: a file of {trainer}'s; import the command that names it: accelerate launch ...")
    theirs = Theirs(
        path, trainer, {str(name): value for name, value in file.tree.items()}, file.lines, path.absolute().parent
    )
    return TRANSLATORS[trainer](theirs)


def leave_out_unread(translation: Translation) -> None:
    """Turn settings that nothing would read into remarks: other trainers accept them without their switch."""
    tree = yaml_of(Path("mine.yaml"), as_yaml(translation, "mine.yaml")).tree
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError:  # `checked` reports it
        return
    for found in unread_settings(config):
        if found.name in translation.settings and not found.need.replaces:
            origin = translation.settings.pop(found.name).origin
            reason = f"{found.name} would have no effect, because {found.need.reason(config)}"
            translation.left_out.append(Remark(origin, reason))


def checked(translation: Translation, text: str) -> None:
    """Raise Refused if what was written is not a valid configuration here."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix=SCRATCH) as folder:
        file = Path(folder) / "mine.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            load_config(file, with_lines=False)
        except UserError as error:
            lines = str(error).split("\nerror: ")
            raise Refused(f"{os.fspath(translation.theirs.path)}: {'; '.join(lines)}") from None
