"""The command typed by the user, passed from the launcher to the ranks for the run's record and for resuming."""

import base64
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

OPTION = "--typed"
RESUME = "training.resume_from_checkpoint"


def encode_command(argv: Sequence[str]) -> str:
    """Encode a command as a single argument that needs no quoting in shells of other hosts."""
    return f"{OPTION}={base64.urlsafe_b64encode(json.dumps(list(argv)).encode()).decode().rstrip('=')}"


def command_typed(argv: Sequence[str]) -> list[str]:
    """Return the command typed by the user: from the launcher's argument, else `argv` itself."""
    typed = list(argv)
    for word in argv:
        if word.startswith(f"{OPTION}="):
            coded = word.partition("=")[2]
            typed = json.loads(base64.urlsafe_b64decode(coded + "=" * (-len(coded) % 4)))
    return [Path(typed[0]).name, *typed[1:]]


def resume_command(argv: Sequence[str], *, overwrites: bool) -> str:
    """Return the command that resumes this run, which may have started by overwriting an earlier one.

    Ranks started by another launcher do not know its command; for them, only the settings to add are named.
    """
    program, *words = command_typed(argv)
    settings = [f"{RESUME}=latest", *["output.overwrite=false"] * overwrites]
    if program not in ("zerolora", "cli.py"):
        return f"the same command and {' '.join(settings)}"
    kept = [word for word in words if not word.startswith((f"{RESUME}=", "resume_from_checkpoint="))]
    return shlex.join(["zerolora", *kept, *settings])
