"""Prestarted ranks of this machine: they import during the checks, and wait for the launcher's message to start.

Their standard input is a socket to the launcher. The first rank does the checks and sends CHECKED, or exits with their
exit code; the launcher, once it holds the run's folder, sends every rank a StartMessage.
"""

import json
import os
import socket
from dataclasses import asdict, dataclass

OPTION = "--held"
"""Follows the configuration and its overrides, the only arguments known so early."""
CHECKED = b"checked\n"


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
