"""From a YAML file and key=value overrides to a RunConfig, or to one line for each mistake."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from trainer.config.checks import check_combinations
from trainer.config.doubts import doubts
from trainer.config.errors import UserError, UserErrors
from trainer.config.given import Given
from trainer.config.messages import all_mistakes
from trainer.config.overrides import parse_override
from trainer.config.sections import RunConfig
from trainer.config.yaml_core import dump, read_yaml


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

    Raises UserError naming the setting, its value and the fix; for several mistakes of single settings, all of them.
    """
    file = read_yaml(Path(path))
    given = Given(Path(path), file.lines if with_lines else {})
    given.add_file(file.tree)
    for override in overrides:
        given.override(*parse_override(override))
    given.check_bits()
    try:
        config = RunConfig.model_validate(given.tree)
    except ValidationError as error:
        raise UserErrors([given.located(name, line) for name, line in all_mistakes(error, given.names)]) from None
    try:
        check_combinations(config)
    except UserError as error:
        raise UserError(given.located_by_name(str(error))) from None
    return LoadedConfig(config, (*given.notes, *doubts(config)))


def dump_yaml(config: RunConfig) -> str:
    """The resolved configuration as YAML that `load_config` reads back to the same value."""
    return dump(config.model_dump(mode="json"))
