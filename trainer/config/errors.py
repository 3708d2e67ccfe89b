"""The one exception for mistakes of the user, and the search for the name they meant."""

import argparse
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn


class UserError(Exception):
    """A mistake in the configuration, the command line or the data: shown as one line, exit code 2, nothing written."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        # One line is a promise to whoever reads a cluster log: messages of libraries are folded into it.
        super().__init__(" ".join(message.split()))


class UserErrors(UserError):
    """Several mistakes found together, a line each; a single one is as a UserError."""

    def __init__(self, messages: Sequence[str]) -> None:
        super().__init__(messages[0])
        self.messages = [str(UserError(message)) for message in messages]

    def __str__(self) -> str:
        # Whoever shows it writes `error: ` in front of the first.
        return "\nerror: ".join(self.messages)


class CommandParser(argparse.ArgumentParser):
    """argparse, whose mistakes are one line and exit code 2 like all others."""

    def error(self, message: str) -> NoReturn:
        """End the process."""
        from trainer.config.messages import as_override  # it imports this module

        words = message.partition("unrecognized arguments: ")[2].split()
        if words and (override := as_override(words[0], words)):
            message = f"{words[0].partition('=')[0]}: settings are written without dashes: {override}"
        self.exit(UserError.exit_code, f"error: {' '.join(message.split())}; `{self.prog} --help` says how\n")


def nearest(name: str, known: Iterable[str], likeness: float = 0.7) -> str | None:
    """The known name closest to a mistyped one, or None if nothing is close."""
    candidates = list(known)
    by_case = {candidate.lower(): candidate for candidate in candidates}
    matches = get_close_matches(name.lower(), list(by_case), n=1, cutoff=likeness)
    return by_case[matches[0]] if matches else None


def shown(value: Any, limit: int = 80) -> str:
    """A value as one would write it in YAML on one line, cut if it is long."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if value == "":
        return "''"
    if isinstance(value, dict):
        value = "{" + ", ".join(f"{shown(key)}: {shown(inner)}" for key, inner in value.items()) + "}"
    text = "[" + ", ".join(shown(item) for item in value) + "]" if isinstance(value, (list, tuple)) else str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
