"""The argument parser of all commands."""

import argparse
from typing import NoReturn

from trainer.config.errors import UserError, one_line
from trainer.config.messages import suggest_override


def positive_int(text: str) -> int:
    """Parse a whole number of at least 1, as the type of an argument."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, 1 or more")
    return value


class CommandParser(argparse.ArgumentParser):
    """An argument parser that reports mistakes like all others: one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Print an error message and exit; `--training.epochs 3` is answered with the override to write."""
        words = message.partition("unrecognized arguments: ")[2].split()
        if words and (override := suggest_override(words[0], words)):
            message = f"{words[0].partition('=')[0]}: settings are written without dashes: {override}"
        self.exit(UserError.exit_code, f"error: {one_line(message)}; `{self.prog} --help` says how\n")
