"""The one exception for mistakes of the user, and the search for the name they meant."""

import errno
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

LONGEST_LINE = 1_000
LONGEST_WORD = 300
MOST_LINES = 100


# Sequences that a terminal obeys (colours, the window's title, answers typed into the shell), then single characters.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?|\x1b[ -/]*[0-~]?"
    r"|\x9b[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def printable(text: str) -> str:
    """Return text without the control characters and sequences that a terminal would obey; tabs and newlines stay.

    Everything that comes from files, other hosts or other processes goes through this before it reaches a terminal.
    """
    return _CONTROL.sub("", text)


def one_line(message: str) -> str:
    """Return a message on one printable line of bounded length.

    The beginning names the setting and the end the fix, so it is the middle that is left out, of words first.
    """
    words = [_without_middle(word, LONGEST_WORD) for word in printable(" ".join(message.split())).split()]
    return _without_middle(" ".join(words), LONGEST_LINE)


def _without_middle(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end - 3]}...{text[-end:]}"


DATA_WANTED = (
    "dataset.path: missing; say what to train on, as dataset.path=train.jsonl does: a .jsonl, .json, .parquet, .csv or "
    ".txt file, a folder of them, or a data set of the hub, whose records have messages | conversations | "
    "instruction + output | prompt + completion | text"
)


class UserError(Exception):
    """A mistake in the configuration, the command line or the data: shown as one line, exit code 2, nothing written."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        # One line is a promise to whoever reads a cluster log: messages of libraries are folded into it.
        super().__init__(one_line(message))


class UserErrors(UserError):
    """Several mistakes found together, a line each; a single one is as a UserError."""

    def __init__(self, messages: Sequence[str]) -> None:
        super().__init__(messages[0])
        self.messages = [str(UserError(message)) for message in messages[:MOST_LINES]]
        if len(messages) > MOST_LINES:
            self.messages.append(f"and {len(messages) - MOST_LINES:,} mistakes more, told when these are mended")

    def __str__(self) -> str:
        # Whoever shows it writes `error: ` in front of the first.
        return "\nerror: ".join(self.messages)


_OF_PATHS = {
    errno.EACCES: "give this user the right to read it",
    errno.EPERM: "give this user the right to read it",
    errno.ENAMETOOLONG: "no file can be called that; name another",
    errno.ELOOP: "its links lead in a circle; name the file itself",
}


def mistake_in_path(error: OSError) -> UserError | None:
    """The line for a path that this user may not look at, or that cannot be; None for an error of another kind.

    Any question about a file may end so, which is why the commands ask here last instead of before each question.
    """
    fix = _OF_PATHS.get(error.errno or 0)
    return None if fix is None or error.filename is None else UserError(f"{error.filename}: {error.strerror}; {fix}")


def nearest(name: str, known: Iterable[str], likeness: float = 0.7) -> str | None:
    """The known name closest to a mistyped one, or None if nothing is close."""
    candidates = list(known)
    by_case = {candidate.lower(): candidate for candidate in candidates}
    matches = get_close_matches(name.lower(), list(by_case), n=1, cutoff=likeness)
    return by_case[matches[0]] if matches else None


def shown(value: Any, limit: int = 80) -> str:
    """Return a value as YAML writes it on one printable line, without its middle if it is long."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if value == "":
        return "''"
    if isinstance(value, dict):
        value = "{" + ", ".join(f"{shown(key)}: {shown(inner)}" for key, inner in value.items()) + "}"
    text = "[" + ", ".join(shown(item) for item in value) + "]" if isinstance(value, (list, tuple)) else str(value)
    return _without_middle(printable(text), limit)
