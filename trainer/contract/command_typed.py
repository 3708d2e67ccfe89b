"""The command that the user typed, which the launcher passes to the ranks: for the run's record, and to resume it."""

import base64
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

OPTION = "--typed"
RESUME = "training.resume_from_checkpoint"


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


def resume_command(argv: Sequence[str], *, overwrites: bool) -> str:
    """Return the whole command that resumes this run, which may have begun by overwriting an earlier one.

    Ranks that another launcher started do not know its command, and get the setting to add to it.
    """
    program, *words = command_typed(argv)
    settings = [f"{RESUME}=latest", *["output.overwrite=false"] * overwrites]
    if program not in ("zerolora", "cli.py"):
        return f"the same command and {' '.join(settings)}"
    kept = [word for word in words if not word.startswith((f"{RESUME}=", "resume_from_checkpoint="))]
    return shlex.join(["zerolora", *kept, *settings])
