"""Exceptions for user errors, messages for pydantic's errors, and suggestions for mistyped names."""

import errno
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic_core import ErrorDetails, ValidationError

from trainer.config.aliases import read_table

PROBLEMS: dict[str, str] = read_table(Path(__file__).with_name("problems.yaml"))
"""Error messages by pydantic error type."""
LONGEST_LINE = 1_000
LONGEST_WORD = 300
MAX_LINES = 100
# Terminal control sequences (colors, the window title, text typed into the shell), then single characters.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?|\x1b[ -/]*[0-~]?"
    r"|\x9b[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def sanitize(text: str) -> str:
    """Remove control characters and terminal control sequences, except tabs and newlines.

    All text from files, other hosts or other processes must pass through this before it reaches a terminal.
    """
    return _CONTROL.sub("", text)


def format_one_line(message: str) -> str:
    """Format a message as one printable line of bounded length.

    Long words and long messages are shortened in the middle, because a message begins with the setting and ends
    with the fix.
    """
    words = [_shorten(word, LONGEST_WORD) for word in sanitize(" ".join(message.split())).split()]
    return _shorten(" ".join(words), LONGEST_LINE)


def _shorten(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    end = limit // 3
    return f"{text[: limit - end - 3]}...{text[-end:]}"


class UserError(Exception):
    """Raised for a mistake in the configuration, command line or data; shown on one line, with exit code 2."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        # Cluster logs are searched line by line, so messages from libraries are joined into one line.
        super().__init__(format_one_line(message))


class UserErrors(UserError):
    """Raised for several mistakes at once; each is shown on its own line."""

    def __init__(self, mistakes: Sequence["Mistake | str"]) -> None:
        super().__init__(str(mistakes[0]))
        self.mistakes = mistakes
        self.messages = [str(UserError(str(mistake))) for mistake in mistakes[:MAX_LINES]]
        if len(mistakes) > MAX_LINES:
            self.messages.append(f"and {len(mistakes) - MAX_LINES:,} more mistakes; fix these first to see them")

    def __str__(self) -> str:
        # The caller prints `error: ` before the first line.
        return "\nerror: ".join(self.messages)


_PATH_FIXES = {
    errno.EACCES: "fix its permissions",
    errno.EPERM: "fix its permissions",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ELOOP: "remove the loop of symlinks, or use the real path",
}


def convert_path_error(error: OSError) -> UserError | None:
    """Convert an OSError about permissions or an invalid path to a UserError. Return None for other errors.

    Any file operation may raise such an error, so commands convert it in one place instead of checking every path.
    """
    fix = _PATH_FIXES.get(error.errno or 0)
    return None if fix is None or error.filename is None else UserError(f"{error.filename}: {error.strerror}; {fix}")


def describe_first_error(error: ValidationError) -> str:
    """Describe the first error, prefixed with the dotted name of the invalid value, and the value, if it has a name."""
    errors = error.errors(include_url=False)
    # For a union, pydantic reports each alternative, and also adds it to the name.
    informative = [each for each in errors if each["type"] in ("value_error", "string_pattern_mismatch")]
    first = next((each for each in informative if each["input"] == errors[0]["input"]), errors[0])
    tag = r"int|float|str|bool|callable|(list|dict|constrained|function).+"
    name = ".".join(str(part) for part in first["loc"] if not re.fullmatch(tag, str(part)))
    problem = re.sub("; (put|fix) it.*", "", describe_problem(first))  # the caller names the fix
    if name and first["type"] != "missing":
        value = to_text(first["input"])
        name += f'="{value}"' if isinstance(first["input"], str) else f"={value}"
    return f"{name}: {problem}" if name else problem


def describe_problem(error: ErrorDetails) -> str:
    kinds: dict[type, str] = {list: "a list", dict: "a mapping", bool: to_text(error["input"])}
    if error["type"] == "string_type" and (kind := kinds.get(type(error["input"]))):
        return f"must be a string, not {kind}"
    if template := PROBLEMS.get(error["type"]):
        bounds = {
            name: f"{value:.12g}" if isinstance(value, float) and value.is_integer() else value
            for name, value in error.get("ctx", {}).items()
        }
        return template.format(**bounds).replace("be -1, ", "be auto, ")  # AUTO in types.py
    message = error["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def find_nearest(name: str, known: Iterable[str], cutoff: float = 0.7) -> str | None:
    by_case = {candidate.lower(): candidate for candidate in known}
    matches = get_close_matches(name.lower(), list(by_case), n=1, cutoff=cutoff)
    return by_case[matches[0]] if matches else None


def join_choices(choices: Iterable[str]) -> str:
    """Join choices for a message: `a, b or c`."""
    *others, last = [*choices] or [""]
    return f"{', '.join(others)} or {last}" if others else last


def to_text(value: Any, limit: int = 80) -> str:
    """Format a value as in YAML, on one printable line. Long values are shortened in the middle."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if value == "":
        return "''"
    if isinstance(value, dict):
        value = "{" + ", ".join(f"{to_text(key)}: {to_text(inner)}" for key, inner in value.items()) + "}"
    text = "[" + ", ".join(to_text(item) for item in value) + "]" if isinstance(value, (list, tuple)) else str(value)
    return _shorten(sanitize(text), limit)


def format_count(number: int, noun: str) -> str:
    """Format a number with its noun, such as `1 step` or `2,400 steps`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


@dataclass(frozen=True)
class Mistake:
    """An invalid setting, shown as `setting=value: problem; fix (location)`."""

    setting: str
    value: Any
    """None if the message does not show the value."""
    problem: str
    fix: str = ""
    involves: str = ""
    """Other settings that the problem depends on, separated by spaces."""
    name: str = ""
    """The name to show instead of `setting`."""
    location: str = ""
    """Where the setting was given, such as ` (run.yaml:3)`."""

    def __str__(self) -> str:
        value = "" if self.value is None else f"={to_text(self.value)}"
        return f"{self.name or self.setting}{value}: {self.problem}{'; ' if self.fix else ''}{self.fix}{self.location}"

    @property
    def settings(self) -> set[str]:
        """The setting, and the other settings that the problem depends on."""
        return {self.setting, *self.involves.split()}

    def concerns(self, names: Collection[str]) -> bool:
        """Return whether `names` contains one of the mistake's settings, or a part or section of one."""
        pairs = ((f"{setting}.", f"{name}.") for setting in self.settings for name in names)
        return any(setting.startswith(name) or name.startswith(setting) for setting, name in pairs)


MISSING_DATA = Mistake(
    "dataset.path",
    None,
    "missing",
    "set it to the training data, such as dataset.path=train.jsonl: a .jsonl, .json, .parquet, .csv or .txt file, a "
    "folder of them, or a dataset on the Hub, with records of messages | conversations | instruction + output | "
    "prompt + completion | text",
)
