"""Hosts that let this user in by ssh."""

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.cluster.hosts import LOGIN, Hosts

SERVER = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
"""
CLIENT = """\
IdentityFile {folder}/user_key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""
PATIENCE_S = 120.0


@contextmanager
def ssh_daemons(
    hosts: Hosts, nodes: Sequence[str], folder: Path, env: Mapping[str, str]
) -> Iterator[Mapping[str, str]]:
    """An sshd on each node while the block lasts; `env` with an `ssh` that is let in."""
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    (folder / "sshd_config").write_text(SERVER.format(folder=folder))
    (folder / "ssh_config").write_text(CLIENT.format(folder=folder))
    (folder / "bin").mkdir()
    (folder / "bin" / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder}/ssh_config "$@"\n')
    (folder / "bin" / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    for node in nodes:
        start_sshd(hosts, node, folder)
    env = {**env, "PATH": f"{folder}/bin:{env['PATH']}"}
    try:
        deadline = time.monotonic() + PATIENCE_S
        while any(hosts.run(LOGIN, ["ssh", node, "true"], env=env).returncode for node in nodes):
            assert time.monotonic() < deadline, "no sshd"
            time.sleep(0.1)
        yield env
    finally:
        # By host, not by what was started above: a test may have ended one and started another, and one that stays
        # holds the port against the next with keys that are gone.
        daemons = [found for node in nodes for found in hosts.processes(node) if found.name().startswith("sshd")]
        for daemon in daemons:
            daemon.terminate()
        psutil.wait_procs(daemons, timeout=PATIENCE_S)


def start_sshd(hosts: Hosts, node: str, folder: Path) -> None:
    """The daemon of one host, in the background."""
    hosts.run(node, ["/usr/sbin/sshd", "-f", str(folder / "sshd_config")], check=True)
