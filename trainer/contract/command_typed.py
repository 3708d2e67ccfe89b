"""The command that the user typed, for the run's record: the launcher hands it to the ranks, which have another."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path

OPTION = "--typed"


def as_argument(argv: Sequence[str]) -> str:
    """One argument of letters and digits alone: shells of other hosts see it, too."""
    return f"{OPTION}={base64.urlsafe_b64encode(json.dumps(list(argv)).encode()).decode().rstrip('=')}"


def command_typed(argv: Sequence[str]) -> list[str]:
    """What the user typed: from the launcher's argument, or `argv` itself where there is none."""
    typed = list(argv)
    for word in argv:
        if word.startswith(f"{OPTION}="):
            coded = word.partition("=")[2]
            typed = json.loads(base64.urlsafe_b64decode(coded + "=" * (-len(coded) % 4)))
    return [Path(typed[0]).name, *typed[1:]]
