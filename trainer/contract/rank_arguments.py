"""Arguments that the launcher passes to ranks in addition to settings: the typed command and the start message.

A prestarted rank imports libraries during the checks and then waits. Its standard input is a socket to the launcher.
Rank 0 runs the checks and sends CHECKED_MESSAGE, or exits with the checks' exit code. Once the launcher has locked the
run's folder, it sends every rank a StartMessage.
"""

import base64
import json
import os
import shlex
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

TYPED_OPTION = "--typed"
"""Option with the command typed by the user, for the run's record and for resuming."""
RESUME = "training.resume_from_checkpoint"
PRESTARTED = "--prestarted"
"""Flag for a prestarted rank, which otherwise receives only the configuration and its overrides."""
CHECKED_MESSAGE = b"checked\n"


def encode_command(argv: Sequence[str]) -> str:
    """Encode a command as a single argument that needs no quoting in a shell."""
    return f"{TYPED_OPTION}={base64.urlsafe_b64encode(json.dumps(list(argv)).encode()).decode().rstrip('=')}"


def get_typed_command(argv: Sequence[str]) -> list[str]:
    """Return the command that the user typed, with the program's name instead of its path."""
    typed = list(argv)
    for word in argv:
        if word.startswith(f"{TYPED_OPTION}="):
            encoded = word.partition("=")[2]
            typed = json.loads(base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)))
    return [Path(typed[0]).name, *typed[1:]]


def build_resume_command(argv: Sequence[str], *, overwrites: bool) -> str:
    """Return the command that resumes this run; `overwrites` means that the run overwrote an earlier one.

    If `zerolora` did not start the ranks, the command is unknown, and only the settings to add are returned.
    """
    program, *words = get_typed_command(argv)
    settings = [f"{RESUME}=latest", *["output.overwrite=false"] * overwrites]
    if program not in ("zerolora", "cli.py"):
        return f"the same command plus {' '.join(settings)}"
    remaining = [word for word in words if not word.startswith((f"{RESUME}=", "resume_from_checkpoint="))]
    return shlex.join(["zerolora", *remaining, *settings])


@dataclass(frozen=True)
class StartMessage:
    arguments: list[str]
    """All arguments of the rank."""
    log: str
    """File for the rank's output until the rank opens its own log."""

    def send(self, channel: socket.socket) -> None:
        """Send the message, which starts the rank, and close the channel. Does nothing if the rank has exited."""
        with channel, suppress(OSError):
            channel.sendall(json.dumps(asdict(self)).encode() + b"\n")

    @classmethod
    def wait(cls, channel: socket.socket) -> "StartMessage | None":
        """Wait for the message; return None if the launcher has exited."""
        with channel, channel.makefile("rb") as lines:
            line = lines.readline()
        return cls(**json.loads(line)) if line.endswith(b"\n") else None


def open_channel() -> socket.socket:
    """Return the socket inherited as standard input, and replace standard input with /dev/null."""
    channel = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return channel
