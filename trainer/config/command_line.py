"""Parse command lines: the argument parser of all commands, and `key=value` by the type of the setting."""

import argparse
import re
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

from trainer.config.aliases import ALIASES
from trainer.config.errors import UserError, one_line, shown
from trainer.config.messages import setting_type, suggest_override
from trainer.config.values import is_null, is_text, kinds
from trainer.config.yaml_core import parse, plain

_COLLECTION = ("[", "{")
_QUOTES = ("'", '"')


def parse_override(text: str) -> tuple[str, Any]:
    """Return the name as typed and the value, for which text needs no quotes.

    Raises UserError if it is not `name=value`, or brackets are not closed.
    """
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise UserError(f"{text}: not an override; write key=value, such as training.learning_rate=1e-4")
    if not all(name.split(".")):
        better = re.sub(r"\.+", ".", name).strip(".")
        raise UserError(f"{shown(text)}: {name} has an extra dot; write {better or 'training.epochs'}=...")
    if name.startswith("-"):
        raise UserError(f"{shown(text)}: settings have no dashes; write {name.lstrip('-')}={shown(value)}")
    return name, _value(setting_type(ALIASES.get(name, name)), name, value)


def _value(annotation: Any, name: str, value: str) -> Any:
    text = value.strip()
    if text.startswith(_QUOTES):
        quoted = _quoted(text)
        if quoted is not None:
            return quoted
    if annotation is not None and is_text(annotation):
        return None if not text or is_null(annotation, text) else value
    is_list_of_words = annotation is not None and tuple in kinds(annotation)
    if not text.startswith(_COLLECTION):
        return plain(text) if not is_list_of_words or plain(text) is None else value
    try:
        return parse(text)
    except ValueError:
        if is_list_of_words:
            return value
        raise UserError(
            f"{name}={shown(value)}: not valid YAML; close its brackets, and put text with # or : in quotes"
        ) from None


def _quoted(text: str) -> str | None:
    try:
        value = parse(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def positive_int(text: str) -> int:
    """Parse a whole number of at least 1, as the type of an argument."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, 1 or more")
    return value


Main = Callable[[list[str] | None], int | None]


def reports_errors(*failures: type[Exception]) -> Callable[[Main], Callable[..., int]]:
    """Make a command return its exit code: its own or 0, 2 for a user error, 1 for one of `failures`.

    Errors are printed to stderr in one line.
    """

    def decorate(main: Main) -> Callable[..., int]:
        @wraps(main)
        def run(argv: list[str] | None = None) -> int:
            try:
                return main(argv) or 0
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
                return error.exit_code
            except failures as error:
                print(f"failed: {one_line(str(error))}", file=sys.stderr)
                return 1

        return run

    return decorate


class CommandParser(argparse.ArgumentParser):
    """An argument parser that reports mistakes like all others: one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Print an error message and exit; `--training.epochs 3` is answered with the override to write."""
        words = message.partition("unrecognized arguments: ")[2].split()
        if words and (override := suggest_override(words[0], words)):
            message = f"{words[0].partition('=')[0]}: settings are written without dashes: {override}"
        message = message.removesuffix(", key=value")  # which argparse takes for required
        self.exit(UserError.exit_code, f"error: {one_line(message)}; `{self.prog} --help` says how\n")
