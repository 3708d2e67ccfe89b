"""Parse command lines: the argument parser for all commands, and `key=value` overrides."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from typing import Any, NoReturn

from trainer.config.aliases import ALIASES
from trainer.config.errors import UserError, find_nearest, format_one_line, join_choices, to_text
from trainer.config.messages import get_setting_type, suggest_override
from trainer.config.values import is_null, is_text, list_accepted_types
from trainer.config.yaml_core import parse_scalar, parse_yaml_value

MAX_RANKS = 65_536
COUNT_OPTIONS = ("--ranks", "--gpus", "--num-gpus", "--world-size", "--gpus-per-node", "--nproc-per-node")
"""The options of different commands, and of torchrun, for the number of ranks."""
_NUMBERS = {"float": "must be a number", "int": "must be a whole number"}
EMPTY_VALUE = "must not be empty; pass a value, or omit it"
TEXTS = ("overrides", "prompts", "settings", "system")
"""Arguments with values that may be empty, or begin or end with spaces."""


def parse_override(text: str) -> tuple[str, Any]:
    """Split `name=value`, and parse the value as the setting's type. Raises UserError if it is malformed."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # how Python represents bytes that are not UTF-8
        raise UserError(f"{text!a}: not valid UTF-8; set the shell's locale to UTF-8")
    name, equals, value = text.partition("=")
    if name.startswith("+"):
        raise UserError(f"{text}: begins with +; write {text.lstrip('+')}")
    name = name.strip()
    if not equals or not name:
        example = f"{name}=VALUE" if get_setting_type(name) else "key=value, such as training.learning_rate=1e-4"
        raise UserError(f"{text}: not an override; write {example}")
    if not all(name.split(".")):
        suggestion = re.sub(r"\.+", ".", name).strip(".")
        raise UserError(f"{to_text(text)}: {name} has an extra dot; write {suggestion or 'training.epochs'}=...")
    if name.startswith("-"):
        raise UserError(
            f"{to_text(text)}: settings are written without leading dashes; write {name.lstrip('-')}={to_text(value)}"
        )
    return name, _parse_typed(get_setting_type(ALIASES.get(name, name)), name, value)


def _parse_typed(annotation: Any, name: str, value: str) -> Any:
    text = value.strip()
    if text.startswith(("'", '"')):
        with suppress(ValueError):
            if isinstance(quoted := parse_yaml_value(text), str):
                return quoted
    if annotation is not None and is_text(annotation):
        return None if not text or is_null(annotation, text) else value
    is_list_of_words = annotation is not None and tuple in list_accepted_types(annotation)
    if not text.startswith(("[", "{")):
        return parse_scalar(text) if not is_list_of_words or parse_scalar(text) is None else value
    try:
        return parse_yaml_value(text)
    except ValueError:
        if is_list_of_words:
            return value
        raise UserError(
            f"{name}={to_text(value)}: not valid YAML; close its brackets, quote it in the shell, or quote # and :"
        ) from None


def parse_positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, 1 or more")
    return value


def parse_rank_count(text: str) -> int:
    if (value := parse_positive_int(text)) > MAX_RANKS:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, 1 to {MAX_RANKS}")
    return value


def parse_port_number(text: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", text) or not 1 <= int(text) <= 65_535:
        raise argparse.ArgumentTypeError(f"{to_text(text)}: must be a port, 1 to 65535")
    return int(text)


def describe_unknown_option(option: str, known: Iterable[str]) -> str:
    """Return an error message for an option that a command does not have, with the most similar of its options."""
    if option in ("-c", "--config"):
        return f"{option}: not an option; pass the configuration file without it"
    names = [*known]
    counts = [name for name in COUNT_OPTIONS if name in names] if option.replace("_", "-") in COUNT_OPTIONS else []
    similar = [*counts, find_nearest(option, names), *(name for name in names if name.startswith(option))]
    hint = next((f"; did you mean {name}?" for name in similar if name), "")
    return f"{option}: not an option of this command{hint}"


Main = Callable[[list[str] | None], int | None]


def reports_errors(*failures: type[Exception]) -> Callable[[Main], Callable[..., int]]:
    """Decorate a command to print errors to stderr instead of raising them, and to return an exit code.

    The exit code is the command's result (0 if None), the UserError's code (usually 2), or 1 for one of `failures`.
    """

    def decorate(main: Main) -> Callable[..., int]:
        @wraps(main)
        def run(argv: list[str] | None = None) -> int:
            try:
                return main(argv) or 0
            except UserError as error:
                is_replaced = "--base-model" in " ".join(sys.argv if argv is None else argv)
                message = str(error).replace("base_model=", "--base-model=") if is_replaced else str(error)
                print(f"error: {message}", file=sys.stderr)
                return error.exit_code
            except failures as error:
                print(f"failed: {format_one_line(str(error))}", file=sys.stderr)
                return 1

        return run

    return decorate


class CommandParser(argparse.ArgumentParser):
    """Argument parser that prints help in boxes and errors on one line (exit code 2), like the launcher's commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # `-5GiB` is a value, not an option

    def add_config(self) -> None:
        """Add the arguments CONFIG and `key=value`."""
        self.add_argument("config", metavar="CONFIG", help="the YAML file of the run")
        self.add_argument("overrides", nargs="*", metavar="key=value", help="settings to override")

    def format_help(self) -> str:
        from rich.console import Console
        from rich.padding import Padding
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        console = Console()
        arguments, options = self._get_positional_actions(), self._get_optional_actions()
        # parse_intermixed_args moves nargs to save_nargs.
        counts = {action.dest: getattr(action, "save_nargs", action.nargs) for action in arguments}
        usage = [f"[{each.metavar}]..." if counts[each.dest] == "*" else f"{{{each.metavar}}}" for each in arguments]
        with console.capture() as capture:
            for text in (" ".join(["Usage:", self.prog, "[OPTIONS]", *usage]), self.description or ""):
                console.print(Padding(Text(text), (0, 1)), "")
            for title, actions in (("Arguments", arguments), ("Options", [*options[1:], *options[:1]])):
                table = Table.grid("", "", *[""] * (title == "Options"), padding=(0, 2))
                table.columns[0].no_wrap, table.columns[1].overflow = True, "fold"
                for action in [action for action in actions if action.help != argparse.SUPPRESS]:
                    names = (Text(name, "bold cyan") for name in _format_option(action))
                    table.add_row(*names, Text(_format_help(action)))
                if actions:
                    console.print(Panel(table, title=title, title_align="left", border_style="dim"))
            console.print(Text(self.epilog or ""), soft_wrap=True, end="\n" * bool(self.epilog))
        return capture.get()

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.dest not in TEXTS:
            arg_strings = [os.path.expanduser(word.strip()) for word in arg_strings]
            if "" in arg_strings:
                raise argparse.ArgumentError(action, EMPTY_VALUE)
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        self.exit(UserError.exit_code, f"error: {self.describe_error(message)}\n")

    def describe_error(self, message: str) -> str:
        """Return argparse's message with a fix, such as the override to write if a setting was passed as an option."""
        if match := re.fullmatch(r"argument (?:-./)?([^:/]+)(?:/-.)?: (.*)", message, re.DOTALL):
            message = _describe_argument_error(match[1], match[2])
        elif "arguments are required" in message:
            required = [each for each in self._actions if getattr(each, "save_nargs", each.nargs) != "*"]
            helps = {"/".join(each.option_strings) or str(each.metavar): str(each.help) for each in required}
            message = "; ".join(f"{name}: missing; pass {text}" for name, text in helps.items() if name in message)
        words = message.partition("unrecognized arguments: ")[2].split()
        takes_overrides = any(action.dest == "overrides" for action in self._actions)
        if words and not words[0].startswith("-"):
            output = f"write --output {words[0]}, or " * ("--output" in self._option_string_actions)
            message = f"{words[0]}: not an argument of this command; {output}remove it"
        elif words:
            option, known = words[0].partition("=")[0], self._option_string_actions
            override = suggest_override(option) if takes_overrides and option.replace("_", "-") not in known else None
            message = f"{option}: {override}" if override else describe_unknown_option(option, known)
        return f"{format_one_line(message)}{' See' if message.endswith('?') else '; see'} `{self.prog} --help`"


def _describe_argument_error(name: str, problem: str) -> str:
    """Return an error message for argparse's problem with an argument: its value, or that it is with another one."""
    if other := re.fullmatch(r"not allowed with argument (?:-./)?([^/]+)", problem):
        return f"{name}: cannot be combined with {other[1]}; remove one of them"
    if problem.startswith("expected"):
        return f"{name}: has no value; write one after it"
    problem = re.sub(r"invalid (float|int) value: '(.*)'", lambda match: f"{match[2]}: {_NUMBERS[match[1]]}", problem)
    if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", problem):
        choices = join_choices(re.findall("'(.*?)'", choice[2]))
        problem = f"{choice[1]}: must be {choices}"
    return f"{name}{': ' if problem == EMPTY_VALUE else '='}{problem}"


def _format_option(action: argparse.Action) -> tuple[str, ...]:
    kind = "N" if action.type in (int, parse_positive_int, parse_rank_count) else action.dest.upper()
    value = "" if action.nargs == 0 else str(action.metavar or "|".join(action.choices or ()) or kind)
    return (", ".join(reversed(action.option_strings)), value) if action.option_strings else (value,)


def _format_help(action: argparse.Action) -> str:
    text = (action.help or "").replace("%%", "%").removesuffix(".")
    return f"{text[:1].upper()}{text[1:]}.{' [required]' * bool(action.option_strings and action.required)}"
