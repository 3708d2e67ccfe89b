"""The parser of every command's arguments."""

import argparse
from typing import NoReturn

from trainer.config.errors import UserError, one_line
from trainer.config.messages import as_override


def from_one(text: str) -> int:
    """The type of an argument that counts something."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, 1 or more")
    return value


class CommandParser(argparse.ArgumentParser):
    """argparse, whose mistakes are one line and exit code 2 like all others."""

    def error(self, message: str) -> NoReturn:
        """End the process."""
        words = message.partition("unrecognized arguments: ")[2].split()
        if words and (override := as_override(words[0], words)):
            message = f"{words[0].partition('=')[0]}: settings are written without dashes: {override}"
        self.exit(UserError.exit_code, f"error: {one_line(message)}; `{self.prog} --help` says how\n")
