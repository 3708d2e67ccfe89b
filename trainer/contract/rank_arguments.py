"""Arguments that the launcher passes to ranks besides settings: the typed command, and when to start.

A prestarted rank imports during the checks and then waits. Its standard input is a socket to the launcher. The first
rank does the checks and sends CHECKED, or exits with their exit code; the launcher, once it holds the run's folder,
sends every rank a StartMessage.
"""

import base64
import json
import os
import shlex
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

TYPED = "--typed"
"""Carries the command typed by the user, for the run's record and for resuming."""
RESUME = "training.resume_from_checkpoint"
HELD = "--held"
"""Marks a prestarted rank; follows the configuration and its overrides, the only arguments known so early."""
CHECKED = b"checked\n"


def encode_command(argv: Sequence[str]) -> str:
    """Encode a command as a single argument that needs no quoting in shells of other hosts."""
    return f"{TYPED}={base64.urlsafe_b64encode(json.dumps(list(argv)).encode()).decode().rstrip('=')}"


def command_typed(argv: Sequence[str]) -> list[str]:
    """Return the command typed by the user: from the launcher's argument, else `argv` itself."""
    typed = list(argv)
    for word in argv:
        if word.startswith(f"{TYPED}="):
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


@dataclass(frozen=True)
class StartMessage:
    """The message that starts a prestarted rank."""

    arguments: list[str]
    """All arguments of the rank."""
    log: str
    """File for its output until it opens its own log."""

    def send(self, channel: socket.socket) -> None:
        """Start the rank at the other end; a rank that has exited is ignored, as its parent will notice."""
        try:
            channel.sendall(json.dumps(asdict(self)).encode() + b"\n")
        except OSError:
            pass
        channel.close()

    @classmethod
    def wait(cls, channel: socket.socket) -> "StartMessage | None":
        """Block until this rank is started; None if its launcher has exited."""
        with channel, channel.makefile("rb") as lines:
            line = lines.readline()
        return cls(**json.loads(line)) if line.endswith(b"\n") else None


def take_channel() -> socket.socket:
    """Return this process's end of the socket, and replace standard input by /dev/null."""
    channel = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return channel
