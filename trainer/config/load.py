"""From a YAML file and key=value overrides to a RunConfig, or to one line for each mistake."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from trainer.config.doubts import doubts
from trainer.config.errors import UserError, UserErrors
from trainer.config.foreign import written_for
from trainer.config.given import Given
from trainer.config.mistakes import without_mistakes
from trainer.config.overrides import parse_override
from trainer.config.sections import RunConfig
from trainer.config.yaml_core import dump, read_text, yaml_of

DEFAULT_OUTPUT = Path("runs")


@dataclass(frozen=True)
class LoadedConfig:
    """A valid configuration, and what was understood differently from how it was written."""

    config: RunConfig
    notes: tuple[str, ...]


def load_config(
    path: str | Path, overrides: list[str] | tuple[str, ...] = (), *, with_lines: bool = True
) -> LoadedConfig:
    """Read a YAML file, apply `key.sub=value` overrides, and validate the whole.

    `with_lines=False` for a file that the user did not write: mistakes then do not say where in it they stand.

    Raises UserErrors: for every mistake a line with the setting, its value, the fix and the line of the file.
    """
    return load_text(Path(path), read_text(Path(path)), overrides, with_lines=with_lines)


def load_text(
    path: Path, text: str, overrides: list[str] | tuple[str, ...] = (), *, with_lines: bool = True
) -> LoadedConfig:
    """As `load_config`, of a text that stands in the file or may come to."""
    file = yaml_of(path, text)
    given = Given(path, file.lines if with_lines else {})
    mistakes = given.mistakes
    for line, message in file.mistakes:
        mistakes.add_line(line, message)
    given.add_file(file.tree)
    for override in overrides:
        try:
            name, value = parse_override(override)
        except UserError as error:
            mistakes.of_command_line(override, str(error))
        else:
            given.override(name, value)
    if "output_dir" not in given.tree:
        given.tree["output_dir"] = str(DEFAULT_OUTPUT / path.stem)
        given.notes.append(f"output_dir is {given.tree['output_dir']}, after the file; nothing else names it")
    given.check_bits()
    config: RunConfig | None
    try:
        config = RunConfig.model_validate(given.tree)
    except ValidationError as error:
        mistakes.add_values(error)
        config = without_mistakes(given.tree, error)
    left_out = {} if config is None else mistakes.add_combinations(config)
    if with_lines and mistakes.of_file() and (trainer := written_for(file.tree)):
        raise UserError(
            f"{path}: is written for {trainer}, and {mistakes.of_file()} of its settings mean nothing here; translate "
            f"it: zerolora import {path} -o mine.yaml"
        )
    if lines := mistakes.in_order():
        raise UserErrors(lines)
    if left_out:
        given.leave_out(left_out)
        config = RunConfig.model_validate(given.tree)
    assert config is not None, "pydantic refused it without a mistake"
    return LoadedConfig(config, (*given.notes, *doubts(config)))


def dump_yaml(config: RunConfig) -> str:
    """The resolved configuration as YAML that `load_config` reads back to the same value."""
    return dump(config.model_dump(mode="json"))
