"""Hosts on one machine: a network namespace each, with an address, a host name and names for the others.

All of them share the file system and the processes' numbers, as the nodes of a cluster share their home folders. Host
`login` carries the bridge that the others are plugged into. Nothing outside the namespaces is changed.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

NETWORK = "10.77.0"
NAMESPACES = Path("/run/netns")
LOGIN = "login"
# Not `ip netns exec`: it mounts a new /sys, in which slurmd misses /sys/fs/cgroup.
ENTER = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'


class Hosts:
    """`login` and the named nodes; `close` ends every process in them and removes them."""

    def __init__(self, nodes: Sequence[str], folder: Path) -> None:
        self.names = [LOGIN, *nodes]
        self.address = {name: f"{NETWORK}.{10 + number}" for number, name in enumerate(self.names)}
        self._prefix = f"zl{os.getpid()}-"
        self._known = folder / "hosts"
        known = "".join(f"{address} {host}\n" for host, address in self.address.items())
        self._known.write_text("127.0.0.1 localhost\n" + known)
        _remove_abandoned()
        try:
            for name in self.names:
                self._add(name)
        except subprocess.CalledProcessError as error:
            self.close()
            pytest.skip(f"needs network namespaces: {' '.join(error.cmd)}: {error.stderr.decode().strip()}")

    def _add(self, name: str) -> None:
        space = self._prefix + name
        _ip("netns", "add", space)
        _ip("-n", space, "link", "set", "lo", "up")
        device = "bridge"
        if name == LOGIN:
            _ip("-n", space, "link", "add", device, "type", "bridge")
        else:
            device = "eth0"
            ends = ["type", "veth", "peer", "name", name, "netns", self._prefix + LOGIN]
            _ip("-n", space, "link", "add", device, *ends)
            _ip("-n", self._prefix + LOGIN, "link", "set", name, "master", "bridge", "up")
        _ip("-n", space, "address", "add", f"{self.address[name]}/24", "dev", device)
        _ip("-n", space, "link", "set", device, "up")

    def inside(self, host: str, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on a host."""
        network = ["nsenter", f"--net={NAMESPACES / (self._prefix + host)}"]
        # Mounts made outside in a shared folder (`mount --make-shared`) are seen inside, never the other way round.
        own = ["unshare", "--uts", "--mount", "--propagation", "slave"]
        return [*network, *own, "sh", "-c", ENTER, str(self._known), host, *command]

    def start(self, host: str, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command on a host."""
        return subprocess.Popen(self.inside(host, command), text=True, **options)

    def run(
        self,
        host: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 300,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host and return what it wrote."""
        return subprocess.run(
            self.inside(host, command), env=env, timeout=timeout, capture_output=True, text=True, **options
        )

    def processes(self, host: str) -> list[psutil.Process]:
        """Every process on a host."""
        listing = subprocess.run(["ip", "netns", "pids", self._prefix + host], capture_output=True, text=True)
        return [psutil.Process(int(pid)) for pid in listing.stdout.split() if psutil.pid_exists(int(pid))]

    def switch_off(self, host: str) -> None:
        """End everything on a host at once, as a power failure does: the others do not notice its end."""
        self.plug(host, "down")
        _kill_all(self._prefix + host)

    def plug(self, host: str, state: str) -> None:
        """Put a host's cable in (`up`) or pull it out (`down`)."""
        _ip("-n", self._prefix + LOGIN, "link", "set", host, state)

    def close(self) -> None:
        """End every process of every host and remove the namespaces."""
        for name in reversed(self.names):
            _remove(self._prefix + name)


def needs_root(*programs: str) -> None:
    """Skip, with the reason, where this user may not make hosts or a program is missing."""
    if os.geteuid() != 0:
        pytest.skip("needs root: hosts are network namespaces, and their daemons run as root")
    needs_programs("ip", "nsenter", "unshare", *programs)


def needs_programs(*programs: str) -> None:
    """Skip, with the reason, where one is not installed."""
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; scripts/system.sh installs Debian's packages")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _kill_all(space: str) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        pids = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True).stdout.split()
        alive = [pid for pid in map(int, pids) if psutil.pid_exists(pid)]
        if not alive:
            return
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)


def _remove(space: str) -> None:
    _kill_all(space)
    subprocess.run(["ip", "netns", "delete", space], capture_output=True)


def _remove_abandoned() -> None:
    """Remove what test runs that were killed have left."""
    for space in NAMESPACES.glob("zl*-*"):
        owner = space.name[2:].split("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            _remove(space.name)
