"""How ranks of this machine are started before the checks are done: they import meanwhile, and wait to be released.

Standard input of such a rank is a socket to the launcher. The first rank does the checks and says CHECKED there, or
ends with the exit code that they deserve; the launcher, once it holds the run's folder, sends every rank its Release.
"""

import json
import os
import socket
from dataclasses import asdict, dataclass

OPTION = "--held"
"""After the configuration and its overrides, the only arguments that are known by then."""
CHECKED = b"checked\n"


@dataclass(frozen=True)
class Release:
    """What a rank is to go on with."""

    arguments: list[str]
    """All of them, as it would have had them at its start."""
    log: str
    """The file for what it prints until it opens its own log."""

    def send(self, channel: socket.socket) -> None:
        """Release the rank at the other end; one that has ended meanwhile is its parent's to notice."""
        try:
            channel.sendall(json.dumps(asdict(self)).encode() + b"\n")
        except OSError:
            pass
        channel.close()

    @classmethod
    def wait(cls, channel: socket.socket) -> "Release | None":
        """Block until this rank is released; None if whoever started it is gone."""
        with channel, channel.makefile("rb") as lines:
            line = lines.readline()
        return cls(**json.loads(line)) if line.endswith(b"\n") else None


def take_channel() -> socket.socket:
    """This process's end of the socket, which is its standard input until now."""
    channel = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return channel
