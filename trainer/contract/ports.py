"""Rendezvous ports of the ranks, between those of services and those of outgoing connections (32768 and up)."""

import secrets
import socket
from contextlib import suppress

from trainer.config.errors import UserError

FIRST_PORT, PORTS = 10_000, 20_000


def random_port() -> int:
    """Return a port that is probably free on another host."""
    return FIRST_PORT + secrets.randbelow(PORTS)


def free_port() -> int:
    """Return a free port, which no outgoing connection can take; raises UserError after a hundred taken ones."""
    for _ in range(100):
        port = random_port()
        with socket.socket() as listener, suppress(OSError):  # taken: try another
            listener.bind(("", port))
            return port
    raise UserError(
        f"no free port found from {FIRST_PORT} to {FIRST_PORT + PORTS - 1}; use --master-port PORT, or set MASTER_PORT"
    )


def check_free(port: int) -> None:
    """Raise UserError if a port of this host, chosen by the user, is taken."""
    with socket.socket() as listener:
        # Like the ranks' store, so that a recently used port can be used again.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            raise UserError(port_taken_message(port, error.strerror or str(error))) from None


def port_taken_message(port: int, reason: str, host: str = "this host") -> str:
    """Return the error message for a taken rendezvous port."""
    return f"--master-port {port}: not free on {host} ({reason}); choose another one, or omit the option"


def job_port(job_id: int) -> int:
    """Return the port of a SLURM job, the same on every node and different for jobs on the same node."""
    return FIRST_PORT + job_id % PORTS
