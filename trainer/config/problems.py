"""pydantic's errors in words for users."""

import re
from pathlib import Path

from pydantic_core import ErrorDetails, ValidationError

from trainer.config.aliases import read_table

WORDS: dict[str, str] = read_table(Path(__file__).with_suffix(".yaml"))
"""Messages for users by pydantic's type of error."""


def describe_first(error: ValidationError) -> str:
    """Describe the first error, after its dotted name if it is that of a part."""
    first = error.errors(include_url=False)[0]
    # An alternative of a union is a part of the name as well.
    tag = r"int|float|str|bool|(list|dict|constrained|function).+"
    name = ".".join(str(part) for part in first["loc"] if not re.fullmatch(tag, str(part)))
    return f"{name}: {describe_problem(first)}" if name else describe_problem(first)


def describe_problem(found: ErrorDetails) -> str:
    """Describe the values that a setting accepts, given pydantic's error."""
    words = WORDS.get(found["type"])
    if words:
        bounds = {
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in found.get("ctx", {}).items()
        }
        return words.format(**bounds).replace("be -1, ", "be auto, ")  # AUTO in types.py
    message = found["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]
