"""Ports at which the ranks of a run meet.

They lie below the range that Linux takes for outgoing connections (32768 and up), above the services.
"""

import secrets
import socket
from contextlib import suppress

from trainer.config.errors import UserError

FIRST_PORT, PORTS = 10_000, 20_000


def random_port() -> int:
    """A port that is probably free on a host that cannot be asked."""
    return FIRST_PORT + secrets.randbelow(PORTS)


def free_port() -> int:
    """A port on which nothing listens now, and which no outgoing connection takes until the ranks meet.

    Raises UserError if a hundred ports tried are all taken.
    """
    for _ in range(100):
        port = random_port()
        with socket.socket() as listener, suppress(OSError):  # taken: the next
            listener.bind(("", port))
            return port
    raise UserError(
        f"no free port found from {FIRST_PORT} to {FIRST_PORT + PORTS - 1}; use --master-port PORT, or set MASTER_PORT"
    )


def check_free(port: int) -> None:
    """Raises UserError if something listens at a port of this host that the user has chosen."""
    with socket.socket() as listener:
        # As the ranks' store: a port whose last user ended a minute ago can be used again.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            raise UserError(port_is_taken(port, error.strerror or str(error))) from None


def port_is_taken(port: int, reason: str, host: str = "this host") -> str:
    """The line for a port at which the ranks cannot meet."""
    return f"--master-port {port}: not free on {host} ({reason}); name another one, or leave the option out"


def port_of_job(job_id: int) -> int:
    """A port that every node of a SLURM job works out alike; jobs that share a node have different ones."""
    return FIRST_PORT + job_id % PORTS
